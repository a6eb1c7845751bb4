"""Triton kernels and their launchers: op NAME is the function NAME, in NAME.py or in the file of its contract."""
