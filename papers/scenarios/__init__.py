"""Systems of the slides, simulated: KV memory, phases, several models, many queues."""
