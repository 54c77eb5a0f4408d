"""Candidates, forecasts, gains and ranks: which limit, batch size, policy, number of servers or
rate serves an objective best. Advice, the autopilot and `kendall optimize` call it.
"""
