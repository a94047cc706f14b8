"""torch.distributed's store: its bytes, its keys, who waits, one client, one world."""
