"""Text around an engine: prompts in, tokens decoded as they come, and vectors of texts."""
