"""Weights: what a snapshot holds and how it is loaded."""
