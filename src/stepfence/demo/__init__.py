"""A small batch on this machine with launch faults injected, to see what the fence does about them."""
