"""The backward pass of dense attention for every GPU: kernels and plan."""
