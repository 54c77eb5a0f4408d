"""`kendall reproduce`: every table and every computed figure of the documents, beside what they
state.
"""
