"""What graphs and programs consist of: nodes, layouts, instructions, and the random numbers that operators draw."""
