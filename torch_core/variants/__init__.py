"""The kernel variants that models use, and their resources when compiled."""
