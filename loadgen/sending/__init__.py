"""Sending at the right instant, and keeping what came back."""
