"""The specification of attention in plain torch."""
