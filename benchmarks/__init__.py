"""Benchmarks, run by hand: `python -m benchmarks.NAME` from the repository root. No test runs them."""
