"""Cross-checks as a product: the same weights and prompts through jattn and through torch, and a report."""

from __future__ import annotations

from jattn.testing.compare import compare_with_torch
from jattn.testing.report import Report, ReportRow, TokenDifference
from jattn.testing.torch_decoder import TorchDecoder

__all__ = ["Report", "ReportRow", "TokenDifference", "TorchDecoder", "compare_with_torch"]
