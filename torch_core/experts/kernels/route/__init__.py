"""The router: kernel and plan."""
