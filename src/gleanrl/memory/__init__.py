"""Preallocated memory: arenas, windows on them, and leases on delivered batches."""
