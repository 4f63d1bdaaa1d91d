"""What an engine and a request are told: frozen dataclasses with checked fields."""
