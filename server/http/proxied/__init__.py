"""Calls that are passed on to the server behind: read for what the queue needs, changed in the
token limit only.
"""
