"""One worker: the hot loops and what they stand on."""
