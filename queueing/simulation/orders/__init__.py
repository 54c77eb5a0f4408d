"""Orders of service, simulated: compiled sample paths and replications."""
