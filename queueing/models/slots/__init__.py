"""Queues of a continuously batching engine."""
