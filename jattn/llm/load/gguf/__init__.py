"""Reads GGUF files as llama.cpp writes them: the sizes, weights and tokenizer of a model in one file."""
