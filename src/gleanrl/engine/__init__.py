"""Many workers as one: gathers, budgets, batches, background collection."""
