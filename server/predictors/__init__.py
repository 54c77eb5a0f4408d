"""Predicts the lengths of answers for requests that bring no prediction along."""
