"""How fast the engine is, and how its speed changes."""
