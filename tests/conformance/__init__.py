"""The gateway against suites that others wrote: openai-python's own tests, and schemathesis on
our OpenAPI document.
"""
