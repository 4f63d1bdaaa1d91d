"""A feed-forward layer of experts: kernels and plan."""
