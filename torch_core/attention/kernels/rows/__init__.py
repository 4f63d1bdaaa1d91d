"""The kernel of long queries: kernel and plan."""
