"""Seeded problems of multi-head latent attention: paged ones of one key head whose values are a part of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.support import reference
from tests.support.attention_cases import AttentionCase, paged_case
from torch_core import ops
from torch_core.base.specs import AttentionSpec, packed_latent_bytes
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.reference import write_latent_cache

__all__ = ["LatentCase", "latent_case", "random_latent_case"]


@dataclass(frozen=True)
class LatentCase(AttentionCase):
    """One problem; see `AttentionCase`."""

    def call(self, device: str = "cpu", *, with_lse: bool = False, **changes: Any) -> LatentCall[torch.Tensor]:
        return replace(self.run(ops.mla_call, device, **changes), with_lse=with_lse)

    def expected(self, compute_dtype: torch.dtype | None = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(reference.mla_attention_with_lse, compute_dtype=compute_dtype)


def latent_case(
    seed: int, *, seq_lens: Sequence[int], query_lens: Sequence[int], kv_lora_rank: int = 32, rope_dim: int = 16,
    spec: AttentionSpec | None = None, packed: bool = False, **options: Any,
) -> LatentCase:  # fmt: skip
    """Makes a problem; the arguments are those of `paged_case`. Poison stands in all that is not in use.

    With `packed` the cache has packed rows, whose poison is bytes of 255: NaN in every part of a row.
    """
    case = paged_case(
        seed,
        seq_lens=list(seq_lens),
        query_lens=list(query_lens),
        num_kv_heads=1,
        head_size=kv_lora_rank + rope_dim,
        spec=spec or AttentionSpec(scale=(2 * rope_dim + rope_dim) ** -0.5),
        **options,
    )
    operands = {name: x for name, x in case.operands.items() if name != "kv_cache"}
    # Keys of the combined cache; `paged_case` has made other values.
    operands["latent_cache"] = np.ascontiguousarray(case.operands["kv_cache"][:, 0, :, 0])
    if packed:
        operands["latent_cache"] = _packed(operands["latent_cache"].astype(np.float32), kv_lora_rank)
    return LatentCase(
        seed, case.spec, operands, {**case.limits, "kv_lora_rank": kv_lora_rank}, paged=True, options=case.options
    )


def _packed(latents: np.ndarray, kv_lora_rank: int) -> np.ndarray:
    live = ~np.isnan(latents).any(-1)
    rows = torch.from_numpy(latents[live])
    row_bytes = packed_latent_bytes(kv_lora_rank, latents.shape[-1] - kv_lora_rank)
    cache = torch.full((*latents.shape[:2], row_bytes), 255, dtype=torch.uint8)
    slots = torch.from_numpy(np.flatnonzero(live)).int()
    write_latent_cache(
        LatentWriteCall(
            kv_c=rows[:, :kv_lora_rank], k_pe=rows[:, kv_lora_rank:], slot_mapping=slots, latent_cache=cache
        )
    )
    return cache.numpy()


def random_latent_case(seed: int, *, max_seq_len: int = 150, sizes: Sequence[int] = (16, 32, 40, 64)) -> LatentCase:
    """Draws a problem: sizes, dtypes and every option from the seed."""
    rng = np.random.default_rng([seed, 16])
    seq_lens = [int(rng.integers(0, max_seq_len)) for _ in range(int(rng.integers(1, 5)))]
    query_lens = [min(n, int(rng.choice([0, 1, 1, 2, 4, 8]))) for n in seq_lens]
    num_heads = int(rng.choice([1, 2, 3, 5, 8, 16]))
    dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
    cache_dtype = str(rng.choice(["float8_e4m3fn", "float8_e5m2", "int8"])) if rng.random() < 0.3 else None
    options: dict[str, Any] = {}
    if cache_dtype:
        scale = float(rng.uniform(0.5, 2.0)) * (0.025 if cache_dtype == "int8" else 1.0)
        options["k_scale"] = scale if rng.random() < 0.5 else np.array([scale], np.float32)
    if rng.random() < 0.25:
        options["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    return latent_case(
        seed,
        seq_lens=seq_lens,
        query_lens=query_lens,
        kv_lora_rank=int(rng.choice(sizes)),
        rope_dim=int(rng.choice([8, 16, 24])),
        num_heads=num_heads,
        block_size=int(rng.choice([1, 7, 16, 64, 128])),
        dtype=dtype,
        cache_dtype=cache_dtype,
        padding_tokens=int(rng.integers(0, 3)),
        spec=AttentionSpec(
            # The interpreter cannot negate bfloat16.
            scale=-0.15 if dtype == "float32" and rng.random() < 0.4 else 0.15,
            causal=bool(rng.random() < 0.8),
            window_left=int(rng.choice([0, 7, 33])) if rng.random() < 0.2 else None,
            logits_soft_cap=float(rng.uniform(1, 20)) if rng.random() < 0.2 else None,
        ),
        **options,
    )
