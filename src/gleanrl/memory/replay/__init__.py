"""Replay buffers: a storage, a writer that fills it and a sampler that draws from it."""
