"""`jattn doctor`: what this machine has, what works on it, and why the rest does not."""

from __future__ import annotations

from jattn.doctor.report import Check, DoctorReport, collect

__all__ = ["Check", "DoctorReport", "collect"]
