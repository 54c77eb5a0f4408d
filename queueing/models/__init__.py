"""Queueing models, one a module."""
