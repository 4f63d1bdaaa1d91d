"""The norm of rows: kernel and plan."""
