"""Cache writes on CPU tensors."""
