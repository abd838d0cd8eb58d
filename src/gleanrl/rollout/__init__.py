"""One worker: the hot loops and their parts."""
