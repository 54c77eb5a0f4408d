"""How long a slot of a continuously batching engine is taken."""
