"""A model and example inputs in, the joint graph of one step out."""
