"""Predictors of output lengths: their texts, the laws of what they predict, the sizes."""
