"""Servers whose queue is not ours: their metrics, their spans, and what a Prometheus holds of them,
beside the model's predictions.
"""
