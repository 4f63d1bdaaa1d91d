"""The kernels that merge the partial results of several programs."""
