"""The cross-check, by the name that it had before `jattn.llm`."""

from jattn.llm.testing import *  # noqa: F403
from jattn.llm.testing import __all__ as __all__
