"""The memory of a barrier in shared memory holds nothing else, in what the compiler makes of the kernels for Hopper.

What is a barrier stays one for the device until it is told otherwise (PTX ISA, mbarrier.inval), and the device may keep
its state somewhere else meanwhile. The compiler gives the memory of what nobody uses any more to something else.
"""

from __future__ import annotations

import re

import pytest

from torch_core.plan.compile import compile_variant
from torch_core.variants.in_use import variants_in_use

_VARIANTS = {label: variant for label, (variant, _) in variants_in_use().items() if variant.is_gluon}
# Bytes of a barrier.
_BARRIER = 8


# One of them takes seconds to compile.
@pytest.mark.parametrize(
    "label",
    [
        label if label == "backward: hopper_backward_kernel" else pytest.param(label, marks=pytest.mark.nightly)
        for label in _VARIANTS
    ],
)
def test_nothing_is_stored_over_a_barrier(label: str) -> None:
    ptx = compile_variant(_VARIANTS[label], 90).asm["ptx"]
    barriers, stored = _barriers(ptx), _stored(ptx)
    assert [place for place in barriers if stored & {*range(place, place + _BARRIER)}] == []


def test_a_barrier_under_a_stored_word_is_found() -> None:
    ptx = """
        add.s32     %r3, %r1, 64;
        @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
        @%p1 mbarrier.init.shared::cta.b64 [%r1], 2;
        st.shared.v2.b32    [global_smem+56], {%r4, %r5};
        st.shared.b8 [global_smem+71], %r6;
    """
    assert _barriers(ptx) == [0, 64]
    assert _stored(ptx) == {*range(56, 64), 71}


def _barriers(ptx: str) -> list[int]:
    """Bytes from the start of shared memory to each barrier that is opened."""
    places = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    opened = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    assert opened
    return sorted({int(places.get(register, 0)) for register in opened})


def _stored(ptx: str) -> set[int]:
    """The bytes that are stored at places known when compiling: what one role hands to others."""
    stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]", ptx)
    assert stores
    return {int(place or 0) + i for words, bits, place in stores for i in range(int(words or 1) * int(bits) // 8)}
