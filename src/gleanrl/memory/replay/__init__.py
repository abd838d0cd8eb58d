"""Replay buffers: a storage, who writes it in which order, and who draws from it."""
