"""Where workers run: how commands reach them and replies come back."""
