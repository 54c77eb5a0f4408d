"""Estimators of the live model: pure functions of records and instants, with intervals."""
