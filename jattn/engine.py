"""The engine, by the name that it had before `jattn.llm`."""

from jattn.llm.engine import *  # noqa: F403
from jattn.llm.engine import __all__ as __all__
