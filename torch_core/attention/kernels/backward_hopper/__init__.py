"""The backward pass for Hopper, in Gluon: kernels and plan."""
