"""Loading, by the name that it had before `jattn.llm`."""

from jattn.llm.load import *  # noqa: F403
from jattn.llm.load import __all__ as __all__
