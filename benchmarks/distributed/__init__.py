"""Collection over nodes, against bare torch.distributed and the same work elsewhere."""
