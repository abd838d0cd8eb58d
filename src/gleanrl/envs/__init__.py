"""Environments, each made to step into preallocated memory."""
