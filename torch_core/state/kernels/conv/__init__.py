"""The short causal convolution: kernel and plan."""
