"""A linear map of few rows with what stands before and behind it: kernels and plan."""
