"""Engines as actors of Ray, on this machine or on a cluster's."""
