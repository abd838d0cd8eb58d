"""Views of a running collection for users: rates, returns, workers' time, progress."""
