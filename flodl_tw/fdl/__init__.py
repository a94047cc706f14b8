"""flodl's own files and orders: the cluster file, a worker's join: block, what its launcher hands to an agent."""
