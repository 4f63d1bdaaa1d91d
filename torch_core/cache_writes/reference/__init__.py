"""The specification of cache writes in plain torch."""
