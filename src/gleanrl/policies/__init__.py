"""Policies of users, fitted to the environment and run as tensor calls."""
