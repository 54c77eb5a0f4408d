"""The law of a Llama-shaped model on a GPU: its shape, a plain decoder, the measurement, the
fit. The command is bench/gpu_law.py.
"""
