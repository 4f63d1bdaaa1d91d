"""The two products of low-rank adapters, over rows that are sorted by adapter: kernels and plan."""
