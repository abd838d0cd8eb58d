"""Everything between the engine and a worker's source: how workers are started and reached."""
