"""One token through its experts: kernel and plan."""
