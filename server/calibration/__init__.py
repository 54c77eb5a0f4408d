"""The engine's latency law: designed batches, the calibration made of them, and probes in idle
moments.
"""
