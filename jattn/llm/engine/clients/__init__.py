"""The callers of an engine's thread: `Engine`, `DataParallelEngine`, `LLM` and its streams."""
