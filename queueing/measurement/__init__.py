"""What a run shows by itself: records and run files, the audit of arrivals, intervals,
recursion, Little's law.
"""
