"""Layers that keep a state between tokens, one slot for each sequence; `op.py` lists the parts of each op."""
