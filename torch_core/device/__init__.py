"""Device functions that kernels share, in Triton and in Gluon.

What several of them need together is handed on as a NamedTuple, made with its fields in order. Triton's cache key
covers the functions that make and read one, but not the order of its fields: change both together.
"""
