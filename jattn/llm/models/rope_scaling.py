"""RopeScaling: how rotary frequencies are stretched beyond the context that a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported

__all__ = ["MAX_CONTEXT", "ROPE_KEYS", "RopeScaling", "check_number"]

#: Of any model, in tokens.
MAX_CONTEXT = 1 << 24
_ORIGINAL = "original_max_position_embeddings"
#: The keys of each type: those that it needs, and those that it may have.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (_ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("factor", _ORIGINAL, "short_factor", "long_factor"), ("attention_factor",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched; the arithmetic of transformers' types of the same names.

    Attributes:
        rope_type: "linear" divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595); "llama3" divides
            only the slow ones and blends in between (Llama 3.1); "yarn" likewise, by numbers of rotations, and scales
            the attention (Peng et al. 2023, arXiv:2309.00071); "longrope" divides each by a factor of its own (Ding et
            al. 2024, arXiv:2402.13753); "dynamic" changes nothing within max_position_embeddings.
        factor: how many times longer the context becomes; at least 1.
        low_freq_factor: llama3 only; wavelengths above original_max_position_embeddings / this are divided fully.
        high_freq_factor: llama3 only; wavelengths below original_max_position_embeddings / this are kept.
        original_max_position_embeddings: the context of the first training, in tokens.
        attention_factor: yarn and longrope; factor of cosine and sine. None for the paper's value, derived from
            `factor`.
        beta_fast: yarn only; frequencies with more rotations within the first context are kept.
        beta_slow: yarn only; those with fewer are divided fully.
        truncate: yarn only; the two bounds are whole numbers of pairs.
        mscale, mscale_all_dim: yarn only; weights of the value derived from `factor`, for cosine and sine and for the
            scores of attention over latents (DeepSeek-V2, arXiv:2405.04434). None for the paper's.
        short_factor: longrope only; for each pair of elements, of models whose context is the original one.
        long_factor: longrope only; likewise of models with a longer context.

    Raises:
        InvalidInput: a number is out of its range.
        Unsupported: another rope_type.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_KEYS:
            raise Unsupported("rope_type", value=self.rope_type, wanted=f"this build has {', '.join(ROPE_KEYS)}")
        check_number("rope_scaling.factor", self.factor, 1.0, 1e6)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(f"rope_scaling.{name}", getattr(self, name), 1e-6, 1e6)
        for name, low in (("attention_factor", 1e-6), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
            if getattr(self, name) is not None:
                check_number(f"rope_scaling.{name}", getattr(self, name), low, 1e6)
        if not isinstance(self.truncate, bool):
            raise InvalidInput("rope_scaling.truncate", value=self.truncate, wanted="it must be true or false")
        for name in ("short_factor", "long_factor"):
            for index, value in enumerate(getattr(self, name)):
                check_number(f"rope_scaling.{name}[{index}]", value, 1e-6, 1e6)
        check_int(f"rope_scaling.{_ORIGINAL}", self.original_max_position_embeddings, 2, MAX_CONTEXT)
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InvalidInput(
                "rope_scaling.high_freq_factor",
                value=self.high_freq_factor,
                wanted=f"it must be greater than low_freq_factor ({self.low_freq_factor})",
            )

    def check_rotary_dim(self, rotary_dim: int) -> None:
        """Raises InvalidInput unless a longrope has a factor for each pair of `rotary_dim` elements."""
        for name in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            if len(getattr(self, name)) != rotary_dim // 2:
                raise InvalidInput(
                    f"rope_scaling.{name}",
                    f"has {len(getattr(self, name))} entries",
                    f"it must have {rotary_dim // 2}, one for each rotated pair",
                )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raises InvalidInput unless `value` is a finite number, and no bool, from `low` to `high`."""
    # An int may be larger than any float, so it is compared, never converted.
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite:
        raise InvalidInput(name, value=value, wanted=f"it must be a finite number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise InvalidInput(name, value=value, wanted=f"it must be from {low:g} to {high:g}")
