"""The window of recent arrivals and records, and how it is kept in two processes."""
