"""What is compared: one module per suite."""
