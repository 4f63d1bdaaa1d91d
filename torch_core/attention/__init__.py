"""Attention: which kernel serves a call, and a folder for each kernel with its plan and its tiles."""
