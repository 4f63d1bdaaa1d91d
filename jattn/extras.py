"""The packages that come with an extra, and the text that says so where one is missing."""

from __future__ import annotations

_EXTRAS = {"torch": "torch", "triton": "cuda13"}


def missing_extra(error: BaseException) -> str | None:
    """Returns which package an import did not find and how it is installed; None if the error is another one.

    Example:
        >>> missing_extra(ModuleNotFoundError("No module named 'torch'", name="torch"))
        "torch is not installed; pip install 'jattn[torch]'"
        >>> missing_extra(ModuleNotFoundError("No module named 'numpy'", name="numpy")) is None
        True
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = _EXTRAS.get(name.partition(".")[0]) if name else None
    return f"{name} is not installed; pip install 'jattn[{extra}]'" if extra else None
