"""Queues at each of several servers, and one behind the other."""
