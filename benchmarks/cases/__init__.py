"""What is compared: each suite is a function that returns its cases."""
