"""Benchmarks of collection over processes: ``python -m benchmarks.multi``."""
