"""What every room may import: errors, checks, specs."""
