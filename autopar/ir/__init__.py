"""What graphs and programs are made of: nodes, layouts, instructions, and the numbers that operators draw."""
