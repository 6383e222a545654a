"""What needs ranks: the module, the collectives, and the simulator that pretends to have them."""
