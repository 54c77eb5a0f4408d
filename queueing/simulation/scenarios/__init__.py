"""Scenarios of the slides on LLM serving, simulated: KV memory, phases, calls, several models, many
queues.
"""
