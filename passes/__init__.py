"""How a model becomes a program: one step a module. `flow` has the list of steps."""
