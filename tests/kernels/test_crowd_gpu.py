"""Long kernels for Hopper beside other processes on their device, which is theirs by turns: no error, and equal bits.

Each size of heads runs in a process of its own: a CUDA error names the size and what ran, and no other test meets it.
The kernel of the backward pass is what once failed so; prefill, of the same style, is the control.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.crowd import KINDS, Guest, attention, busy_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device"),
]

_HEAD_SIZES = {"128": (128, 128), "64": (64, 64), "192 over 128": (192, 128)}
_NEIGHBOURS = 4
# Each takes some milliseconds alone, and so meets several ends of its share of time.
_RUNS = 50


@pytest.fixture(scope="module")
def guests() -> Iterator[dict[str, Guest]]:
    """A process for each size of heads, which has run everything once; from then on others keep the device busy."""
    with contextlib.ExitStack() as stack:
        make_busy = stack.enter_context(busy_device(_NEIGHBOURS))
        guests = {heads: Guest(attention, *sizes) for heads, sizes in _HEAD_SIZES.items()}
        for guest in guests.values():
            stack.callback(guest.close)
        assert {heads: guest.ask(None) for heads, guest in guests.items()} == dict.fromkeys(guests, "ready")
        make_busy()
        yield guests


@pytest.mark.parametrize("heads", list(_HEAD_SIZES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_others_interrupt_gives_equal_bits(kind: str, heads: str, guests: dict[str, Guest]) -> None:
    assert guests[heads].ask((kind, _RUNS)) == "equal bits"
