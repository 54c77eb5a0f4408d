"""Calls that vLLM's serving objects answer (`server.front`): which they are, their sequences, and
the bytes of their answers.
"""
