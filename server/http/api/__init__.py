"""The surface that clients see: fields served and refused, models and their aliases, tokenising,
the OpenAPI document.
"""
