"""Kendall: queueing delay of LLM inference, predicted beside observed. `kendall.cli` is the command."""
