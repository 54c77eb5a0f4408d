"""What a setting would do at a window's estimates, and what it gains over another one."""
