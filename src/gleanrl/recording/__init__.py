"""Data that stay: frames written to disk while they are collected, and read back."""
