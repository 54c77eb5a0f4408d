"""Token length distributions: laws, fits, files, text, censoring, heavy tails, lattices."""
