"""Plans: shapes, dtypes and device limits in, LaunchPlans out; also the frozen tile tables."""

from __future__ import annotations

from torch_core.plan.plan import ABSENT, Descriptor, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["ABSENT", "ArraySpec", "Descriptor", "DeviceLimits", "LaunchPlan", "OperationPlan", "Pointer", "Scalar"]
