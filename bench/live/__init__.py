"""The live model against a real engine: cells, observations, noise gate, verdicts, page. The
command is bench/live_validation.py.
"""
