"""The autopilot: turns policy, batch size and token limit, one at a time, inside bounds; pure
decisions, no clock, no I/O.
"""
