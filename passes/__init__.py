"""The steps from a model to the program of a rank: capture, blocks and segments, the space of choices, codegen, lowerings."""
