"""Servers that are known by their counters alone: scrapes, what happened between them, the step law
and the prediction that follow.
"""
