"""Engines behind one protocol: the real vLLM, and one that obeys the latency law."""
