"""Metrics, logs, records, and what serving costs."""
