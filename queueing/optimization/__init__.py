"""Which limit, batch size, policy, number of servers or rate serves an objective best, each with
the curve it was chosen from.
"""
