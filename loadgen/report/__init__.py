"""What a run is said to have shown."""
