"""Measurements and campaigns; run one with `python -m benchmarks.NAME`. Nothing here is installed."""
