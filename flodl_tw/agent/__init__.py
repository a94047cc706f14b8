"""The worker's side: a host's agent joins a world, starts its ranks and looks after them."""
