"""HTTP, as a client speaks it."""
