"""The modules that every room may import: errors, checks, limits, specs."""
