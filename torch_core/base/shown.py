"""Text of any value for an error message: short, on one line, and never an error itself; standard library only."""

from __future__ import annotations

import numbers

_LONGEST_TEXT = 80


def shown(value: object) -> str:
    """Returns a value's text for a message: short, and also for an int that Python refuses to print."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    try:
        # numpy's numbers print as numbers: repr() would say np.int32(5).
        text = str(value) if isinstance(value, numbers.Number) else repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
