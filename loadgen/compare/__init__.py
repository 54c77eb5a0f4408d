"""Observed beside predicted and simulated."""
