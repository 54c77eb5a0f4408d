"""Energy of batches: where joules can be read, and the line through them."""
