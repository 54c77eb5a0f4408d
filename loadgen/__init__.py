"""Open-loop load: timetables of absolute instants, a streaming client, run records, statistics,
reports.
"""
