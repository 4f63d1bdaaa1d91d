"""Serving: an engine with a thread of its own for asyncio, and OpenAI's HTTP interface over it."""

from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.serve.conversation import Conversation, Turn

__all__ = ["AsyncLLM", "Conversation", "Turn"]
