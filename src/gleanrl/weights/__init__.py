"""Weights: the contents and the loading of a snapshot."""
