"""Results read from a sweep's folder, its report, the conditions that hold or not."""
