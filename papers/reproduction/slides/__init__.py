"""The slides on queueing, predictions and LLMs (Mitzenmacher and Shahout 2025)."""
