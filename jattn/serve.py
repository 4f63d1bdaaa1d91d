"""The server, by the name that it had before `jattn.llm`."""

from jattn.llm.serve import *  # noqa: F403
from jattn.llm.serve import __all__ as __all__
