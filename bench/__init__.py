"""Benchmarks: `python bench/NAME.py`, or `python -m bench.NAME`."""
