"""The latency law, service and batch times, profiles, energy per batch."""
