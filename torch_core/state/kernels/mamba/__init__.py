"""The state space model of Mamba-2: kernels and plan."""
