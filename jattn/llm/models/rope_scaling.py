"""RopeScaling: how rotary frequencies are stretched beyond the context that a model was first trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Limits, check_fields

#: Of any model, in tokens.
MAX_CONTEXT = 1 << 24
Factor: TypeAlias = Annotated[float, Limits(1e-6, 1e6)]
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
    """The scaling of rotary frequencies, as in transformers' types of the same names.

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
    factor: Annotated[float, Limits(1.0, 1e6)]
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_position_embeddings: Annotated[int, Limits(2, MAX_CONTEXT)] = 8192
    attention_factor: Factor | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    truncate: Annotated[bool, Limits(wanted="true or false")] = True
    mscale: Annotated[float | None, Limits(0.0, 1e6)] = None
    mscale_all_dim: Annotated[float | None, Limits(0.0, 1e6)] = None
    short_factor: tuple[Factor, ...] = ()
    long_factor: tuple[Factor, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_KEYS:
            raise Unsupported("rope_type", value=self.rope_type, wanted=f"this build has {', '.join(ROPE_KEYS)}")
        check_fields(self, prefix="rope_scaling.")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            wanted = f"it must be greater than low_freq_factor ({self.low_freq_factor})"
            raise InvalidInput("rope_scaling.high_freq_factor", value=self.high_freq_factor, wanted=wanted)

    def check_rotary_dim(self, rotary_dim: int) -> None:
        """Raises InvalidInput unless a longrope has a factor for each pair of `rotary_dim` elements."""
        for name in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            if (count := len(getattr(self, name))) != rotary_dim // 2:
                wanted = f"it must have {rotary_dim // 2}, one for each rotated pair"
                raise InvalidInput(f"rope_scaling.{name}", f"has {count} entries", wanted)
