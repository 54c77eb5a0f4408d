"""The commands of the load generator."""
