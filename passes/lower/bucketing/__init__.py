"""What the bucket lowering is made of: packing, gathers ahead, reductions behind, small all-reduces together."""
