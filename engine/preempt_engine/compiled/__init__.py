"""Loops compiled by Numba for a CPU: attention and the small operations between matrix products.

One thread computes a row from start to end, so a row's bits never depend on its batch.
"""
