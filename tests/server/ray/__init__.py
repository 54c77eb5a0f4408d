"""Engines in actors of Ray."""
