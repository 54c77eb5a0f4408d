"""vLLM, embedded."""
