"""The event-driven reference, compiled kernels, experiments and how long they have to run."""
