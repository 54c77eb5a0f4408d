"""Calls that vLLM's serving objects answer (`server.openai_tools`): which they are, their
sequences, and the bytes of their answers.
"""
