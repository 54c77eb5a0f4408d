"""The event loop's clock, work outside of it, and the collector of cycles."""
