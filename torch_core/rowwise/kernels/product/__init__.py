"""The product of rows: kernel and plan."""
