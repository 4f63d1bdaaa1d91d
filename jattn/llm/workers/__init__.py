"""Processes for text that came from outside: templates, grammars, long texts, each with bounds of time and memory."""
