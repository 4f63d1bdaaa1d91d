"""The ops of latents: attention to them, their write, and the scores and slots of DeepSeek's sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.attention.call import SCORE_FIELDS
from torch_core.attention.serves import (
    BATCH_INVARIANT,
    BLOCK_SIZE,
    CONTIGUOUS,
    HEAD_SIZE,
    MAX_LORA_RANK,
    MAX_ROPE_DIM,
    cached_key_dtype,
    key_dtype,
    too_large,
)
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES, ArraySpec
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import compute_dtype, strides


def _row_size(call: LatentCall[Any], implementation: str) -> str | None:
    rank = call.kv_lora_rank
    sizes = (("kv_lora_rank", rank, MAX_LORA_RANK), ("the rotary key", call.head_size - rank, MAX_ROPE_DIM))
    return too_large(implementation, *sizes)


def _biases(call: LatentCall[Any], implementation: str) -> str | None:
    if implementation != "triton":
        return None
    return next((f"{name} is given" for name in (*SCORE_FIELDS, "seq_causal") if getattr(call, name) is not None), None)


register(
    Op(
        call=LatentCall,
        reference="torch_core.latent.reference:mla_attention",
        cpu="torch_core.latent.cpu:mla_attention",
        plan="torch_core.latent.choose:plan_latent",
        serves=(
            compute_dtype("query", (*QUERY_DTYPES, *FP8_DTYPES)),
            cached_key_dtype("latent_cache"),
            HEAD_SIZE._replace(limit=_row_size),
            Served(
                "biases, bidirectional ranges and a causal flag per sequence over latents",
                {"triton": "no", "torch": "yes", "xla": "yes"},
                _biases,
            ),
            BLOCK_SIZE,
            strides(contiguous=CONTIGUOUS),
            BATCH_INVARIANT,
        ),
    ),
    Op(
        call=LatentWriteCall,
        reference="torch_core.latent.reference:write_latent_cache",
        cpu="torch_core.latent.cpu:write_latent_cache",
        plan="torch_core.latent.kernels.write.plan:plan_latent_write",
        serves=(key_dtype("latent_cache", "kv_c", "k_pe"), strides(contiguous=("slot_mapping",))),
    ),
    Op(
        call=IndexerCall,
        reference="torch_core.latent.reference:indexer_logits",
        cpu="torch_core.latent.cpu:indexer_logits",
        plan="torch_core.latent.kernels.indexer.plan:plan_indexer",
        serves=(strides(),),
    ),
    Op(
        call=ChoiceCall,
        reference="torch_core.latent.reference:sparse_mla_attention",
        cpu="torch_core.latent.cpu:chosen_slots",
        plan="torch_core.latent.kernels.indexer.plan:plan_choice",
        serves=(strides(),),
    ),
)


_NUM_BLOCKS = 4096
_FP8 = "float8_e4m3fn"
_SCALE = ArraySpec((1,), "float32")
_CHOSEN = ArraySpec((64, 2048), "int32")
_PACKED_LATENTS = ArraySpec((_NUM_BLOCKS, 64, 656), "uint8")


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of DeepSeek's latents of 512 and rotary keys of 64 elements, in blocks of 64.
    """
    return {
        "latent write": LatentWriteCall(
            kv_c=ArraySpec((64, 512), "bfloat16"),
            k_pe=ArraySpec((64, 64), "bfloat16"),
            slot_mapping=ArraySpec((64,), "int32"),
            latent_cache=_latents("bfloat16"),
        ),
        "latent write rotated packed": LatentWriteCall(
            kv_c=ArraySpec((64, 512), "bfloat16"),
            k_pe=ArraySpec((64, 64), "bfloat16"),
            slot_mapping=ArraySpec((64,), "int32"),
            latent_cache=_PACKED_LATENTS,
            cos_sin_cache=ArraySpec((8192, 64), "bfloat16"),
            positions=ArraySpec((64,), "int32"),
        ),
        "latent decode": _latent_decode(16),
        "latent decode few tokens": _latent_decode(16, num_seqs=8),
        "latent decode fp8": _latent_decode(16, _FP8),
        "latent decode packed": replace(_latent_decode(16), latent_cache=_PACKED_LATENTS),
        "latent decode 128 heads": _latent_decode(128),
        "chosen latents": replace(
            _latent_decode(128), latent_cache=ArraySpec((64 * _NUM_BLOCKS, 1, 576), "bfloat16"), block_tables=_CHOSEN
        ),
        "chosen latents packed": replace(
            _latent_decode(16), latent_cache=ArraySpec((64 * _NUM_BLOCKS, 1, 656), "uint8"), block_tables=_CHOSEN
        ),
        "chosen latents packed 128 heads": replace(
            _latent_decode(128), latent_cache=ArraySpec((64 * _NUM_BLOCKS, 1, 656), "uint8"), block_tables=_CHOSEN
        ),
        "latent decode float32": _latent_decode(16, "float32", dtype="float32"),
        "indexer": IndexerCall(
            query=ArraySpec((64, 64, 128), "bfloat16"),
            weights=ArraySpec((64, 64), "float32"),
            key_cache=ArraySpec((_NUM_BLOCKS, 64, 128), _FP8),
            block_tables=ArraySpec((64, 64), "int32"),
            seq_lens=ArraySpec((64,), "int32"),
            query_start_loc=ArraySpec((65,), "int32"),
            k_scale=_SCALE,
            scale=128**-0.5,
            max_query_len=1,
        ),
        "chosen slots": ChoiceCall(
            topk_indices=_CHOSEN,
            block_tables=ArraySpec((64, 64), "int32"),
            query_start_loc=ArraySpec((65,), "int32"),
            block_size=64,
        ),
    }


def _latents(dtype: str) -> ArraySpec:
    return ArraySpec((_NUM_BLOCKS, 64, 576), dtype)


def _latent_decode(
    heads: int, cache_dtype: str = "bfloat16", *, dtype: str = "bfloat16", num_seqs: int = 64
) -> LatentCall[ArraySpec]:
    """DeepSeek's latents of 512 and rotary keys of 64 elements, in blocks of 64."""
    return LatentCall(
        query=ArraySpec((num_seqs, heads, 576), dtype),
        latent_cache=_latents(cache_dtype),
        kv_lora_rank=512,
        block_tables=ArraySpec((num_seqs, 64), "int32"),
        seq_lens=ArraySpec((num_seqs,), "int32"),
        query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
        scale=192**-0.5,
        max_query_len=1,
    )
