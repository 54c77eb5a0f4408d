"""Client libraries in an environment of their own, against the gateway."""
