"""What a queue is made of: its parts, its arguments, and the systems that it may be."""
