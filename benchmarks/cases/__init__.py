"""What is compared: one suite per module, each run by a command of the same name."""
