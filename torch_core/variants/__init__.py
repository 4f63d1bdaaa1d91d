"""The kernel variants that models use, and what they take when compiled."""
