"""Scores of DeepSeek's indexer: kernel and plan."""
