"""The log-sum-exp of rows: kernel and plan."""
