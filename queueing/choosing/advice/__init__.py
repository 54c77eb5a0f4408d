"""Advice: what other settings would do at a window's estimates, which is best, and by how much
it should be better.
"""
