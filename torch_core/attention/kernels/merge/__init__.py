"""The merge of two partial results: kernel and plan."""
