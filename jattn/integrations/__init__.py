"""Rollout engines and attention for projects that train JAX models; each module needs its project to be installed."""
