"""The steps from a model to the program of a rank: capture, blocks, segments, the space, codegen, lowerings."""
