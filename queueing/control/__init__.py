"""Advice, autopilot and wait estimates."""
