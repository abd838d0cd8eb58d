"""What users see of collection while it goes on: rates, returns, workers' time, progress."""
