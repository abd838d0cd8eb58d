"""Environment libraries, one module each. Re-exports only."""
