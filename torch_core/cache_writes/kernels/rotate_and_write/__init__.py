"""Rotary embedding and the write of keys and values in one launch: kernel and plan."""
