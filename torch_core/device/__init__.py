"""Device functions that kernels share, in Triton and in Gluon.

Values that several of them need together are passed as a NamedTuple, built with its fields in order. Triton's cache key
covers the functions that build and read one, but not the order of its fields: change both together.
"""
