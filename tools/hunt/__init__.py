"""A standing hunt for wrong frames: random collectors over environments that certify themselves."""
