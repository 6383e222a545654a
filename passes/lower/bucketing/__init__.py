"""The parts of the bucket lowering: packing, gathers ahead, reductions behind, small all-reduces together."""
