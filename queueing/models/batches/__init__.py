"""Queues served in batches: the exact chain and what is built on it."""
