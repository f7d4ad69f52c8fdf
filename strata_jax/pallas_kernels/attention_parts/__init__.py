"""What the kernels of attention share: who reads which tiles, products, merging parts, checks."""
