"""DeepSeek's sparse attention on JAX arrays, by each implementation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jattn
from tests.ops.runner import QUICK_COMPILE, arrays, arrays_of
from tests.support.attention_cases import assert_matches_reference, to_torch
from tests.support.sparse_cases import indexer_call, sparse_case
from torch_core import reference

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)]
)
BATCH: dict[str, Any] = {"seq_lens": [40, 0, 7, 19], "query_lens": [3, 0, 7, 1]}


@each_implementation
@pytest.mark.parametrize("packed", [False, True])
def test_chosen_latents_are_attended_to_and_no_others(implementation, packed, seed):
    case = sparse_case(
        seed, **BATCH, topk=9, num_heads=3, kv_lora_rank=128, rope_dim=8, dtype="bfloat16", packed=packed,
        padding_tokens=2, block_size=4,
    )  # fmt: skip
    limits: dict[str, Any] = case.limits
    attend = jax.jit(
        lambda operands: jattn.sparse_mla_attention_with_lse(
            **operands, **limits, scale=case.spec.scale, implementation=implementation
        ),
        compiler_options=QUICK_COMPILE,
    )
    out, lse = attend(arrays(case))
    assert_matches_reference(case, to_torch(np.array(out)), to_torch(np.array(lse)))


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), [("float32", None), ("bfloat16", "float8_e4m3fn")])
def test_the_highest_scores_are_chosen_first_and_absent_keys_never(implementation, dtype, cache_dtype, seed):
    call = indexer_call(seed, **BATCH, dtype=dtype, cache_dtype=cache_dtype)
    options = {name: getattr(call, name) for name in ("scale", "max_query_len", "k_scale")}
    choose = jax.jit(
        lambda operands: jattn.indexer_topk(**operands, **options, topk=12, implementation=implementation),
        compiler_options=QUICK_COMPILE,
    )
    found = np.array(choose(arrays_of(call)))
    logits = reference.indexer_logits(call).numpy()
    for token, row in enumerate(found):
        chosen = row[: min(12, int((logits[token] > -np.inf).sum()))]
        assert (chosen >= 0).all()
        assert (row[len(chosen) :] == -1).all()
        assert len(set(chosen.tolist())) == len(chosen)
        assert logits[token, chosen].tolist() == np.sort(logits[token])[::-1][: len(chosen)].tolist()
