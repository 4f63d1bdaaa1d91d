"""Calls of tools and reasoning in a model's text: formats, one incremental parser, grammars."""
