"""The e4m3 prefill kernel for Hopper, in Gluon: kernel and plan."""
