"""Many policies and many environments, and one law over all their pairs: see `test_laws`."""
