"""What the gateway itself costs: processor time over all, and the time of each stage of a call,
one call in 64.
"""
