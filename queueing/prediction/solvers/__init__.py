"""Models of queues, a module each: the solvers that it has are its `SOLVERS`."""
