"""Generation: models, loading, the engine, the server and the cross-check."""
