"""ParallelBlocks (CFP Algorithm 1): groups of operators that split together without communication."""
