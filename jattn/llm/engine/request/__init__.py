"""A request, its validation, and its outputs."""
