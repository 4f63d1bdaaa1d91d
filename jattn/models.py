"""The models, by the name that they had before `jattn.llm`."""

from jattn.llm.models import *  # noqa: F403
from jattn.llm.models import __all__ as __all__
