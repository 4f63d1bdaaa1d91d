"""The memory of a barrier in shared memory holds nothing else, in what the compiler makes of the kernels for Hopper.

What is a barrier stays one for the device until it is told otherwise (PTX ISA, mbarrier.inval), and the device may keep
its state somewhere else meanwhile. The compiler keeps the memory of what it hands the roles, until all of them have
ended, and gives away that of the rest: there it puts the numbers that it hands them, for one.
"""

from __future__ import annotations

import re

import pytest

from torch_core.launch.compile import compile_variant
from torch_core.variants.in_use import variants_in_use

_VARIANTS = {label: variant for label, (variant, _) in variants_in_use().items() if variant.is_gluon}
# Each takes seconds to compile.
_OFTEN = ("backward latent prompt: hopper_backward_kernel", "latent decode: hopper_latent_kernel")


@pytest.mark.parametrize(
    "label", [label if label in _OFTEN else pytest.param(label, marks=pytest.mark.nightly) for label in _VARIANTS]
)
def test_each_barrier_is_handed_to_the_roles(label: str) -> None:
    ttgir = compile_variant(_VARIANTS[label], 90).asm["ttgir"]
    barriers, kept = _barriers(ttgir)
    assert bool(barriers) == ("ttg.warp_specialize" in ttgir), "only kernels of one role have no barriers"
    assert barriers - kept == set()


def test_a_barrier_that_no_role_gets_is_found() -> None:
    barriers, kept = _barriers("""
        %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable>
        %full_1 = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared, #smem, mutable>
        %tile = ttg.local_alloc : () -> !ttg.memdesc<64x64xbf16, #shared, #smem, mutable>
        ttg.warp_specialize(%full, %tile, %3) attributes {requestedRegisters = array<i32: 24>}
    """)
    assert barriers - kept == {"%full_1"}


def _barriers(ttgir: str) -> tuple[set[str], set[str]]:
    """What is allocated for barriers, and what is handed to the roles."""
    handed = "".join(re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir))
    barriers = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]+xi64,", ttgir)
    return set(barriers), set(re.findall(r"%\w+", handed))
