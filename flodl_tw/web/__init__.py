"""What the port answers to HTTP: the state, a page for people, and the operator's start."""
