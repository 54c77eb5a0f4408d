"""Several engines as one."""
