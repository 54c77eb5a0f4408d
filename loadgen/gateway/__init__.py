"""A gateway as a child process."""
