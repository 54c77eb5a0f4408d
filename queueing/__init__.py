"""The mathematics: token distributions, the latency law, exact predictions, simulation, run
records.
"""
