"""From the bytes of a call to the bytes of its answer."""
