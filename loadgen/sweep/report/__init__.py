"""Results read from the folder of a sweep, and their report."""
