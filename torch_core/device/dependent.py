"""Launches that begin before the one in front of them has ended: programmatic dependent launch, from Hopper on."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: The first devices that can.
DEPENDENT_ARCH = 90


@triton.jit
def let_next_begin():
    """The launch behind may begin once every program has come here or ended."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Returns once the launch in front has ended, and all that it wrote is there."""
    gdc_wait()
