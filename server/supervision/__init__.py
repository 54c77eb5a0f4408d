"""Faults: an engine that dies or hangs, a queue that stands still, a reader that does not read;
and what becomes of the requests.
"""
