"""The options of an engine and of a request: frozen dataclasses with checked fields."""
