"""Writes to the paged cache: keys and values, rotated ones, copies of blocks."""
