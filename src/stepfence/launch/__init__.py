"""How a step reaches a node."""
