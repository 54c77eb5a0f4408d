"""Orders of service with predicted sizes: one server, Poisson arrivals, any law of size and
prediction.
"""
