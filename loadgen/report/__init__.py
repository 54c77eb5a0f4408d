"""Reports of runs: on a terminal, in files, as a page."""
