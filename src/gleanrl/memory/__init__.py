"""Preallocated memory: arenas, windows on them, and leases on what was handed out."""
