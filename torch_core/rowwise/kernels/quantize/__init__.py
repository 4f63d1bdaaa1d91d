"""Rows as e4m3 numbers with scales: kernel and plan."""
