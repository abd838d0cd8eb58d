"""Comparisons: each suite is a function that returns its cases."""
