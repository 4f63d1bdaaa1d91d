"""The 16-bit prefill kernel for Hopper, in Gluon: kernel and plan."""
