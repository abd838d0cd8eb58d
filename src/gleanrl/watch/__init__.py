"""Views of a running or finished collection."""
