"""Cross-checks as a product: the same weights and prompts through jattn and through torch, and a report."""

from __future__ import annotations

from jattn.llm.testing.bits import BitsReport, compare_bits
from jattn.llm.testing.compare import compare_with_torch
from jattn.llm.testing.report import (
    CrosscheckReport,
    CrosscheckRow,
    LayerRow,
    TokenDifference,
    check_picture_path,
    save_picture,
)
from jattn.llm.testing.torch_decoder import TorchDecoder

__all__ = [
    "BitsReport",
    "CrosscheckReport",
    "CrosscheckRow",
    "LayerRow",
    "TokenDifference",
    "TorchDecoder",
    "check_picture_path",
    "compare_bits",
    "compare_with_torch",
    "save_picture",
]
