"""The ops of latents: attention to them, their write, and the scores and slots of DeepSeek's sparse attention."""

from __future__ import annotations

from typing import Any

from torch_core.attention.call import SCORE_FIELDS
from torch_core.attention.serves import (
    BLOCK_SIZE,
    CONTIGUOUS,
    HEAD_SIZE,
    MAX_LORA_RANK,
    MAX_ROPE_DIM,
    cached_key_dtype,
    key_dtype,
    too_large,
)
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
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
        reference="torch_core.latent.reference.latent:mla_attention",
        cpu="torch_core.latent.cpu.latent:mla_attention",
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
        ),
    ),
    Op(
        call=LatentWriteCall,
        reference="torch_core.latent.reference.latent:write_latent_cache",
        cpu="torch_core.latent.cpu.latent:write_latent_cache",
        plan="torch_core.latent.kernels.write.plan:plan_latent_write",
        serves=(key_dtype("latent_cache", "kv_c", "k_pe"), strides(contiguous=("slot_mapping",))),
    ),
    Op(
        call=IndexerCall,
        reference="torch_core.latent.reference.sparse:indexer_logits",
        cpu="torch_core.latent.cpu.indexer:indexer_logits",
        plan="torch_core.latent.kernels.indexer.plan:plan_indexer",
        serves=(strides(),),
    ),
    Op(
        call=ChoiceCall,
        reference="torch_core.latent.reference.sparse:sparse_mla_attention",
        cpu="torch_core.latent.cpu.choice:chosen_slots",
        plan="torch_core.latent.kernels.indexer.plan:plan_choice",
        serves=(strides(),),
    ),
)
