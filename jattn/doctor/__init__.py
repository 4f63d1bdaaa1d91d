"""`jattn doctor`: the parts of this machine, the features that work on it, and why others do not."""

from __future__ import annotations

from jattn.doctor.report import Check, DoctorReport, collect

__all__ = ["Check", "DoctorReport", "collect"]
