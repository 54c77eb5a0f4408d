"""Several engines, started by the gateway, as one: each is one server of the queue."""
