"""Representative calls of DeepSeek's latents of 512 and rotary keys of 64 elements, in blocks of 64."""

from __future__ import annotations

from dataclasses import replace

from torch_core.base.specs import ArraySpec
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call

_NUM_BLOCKS = 4096
_FP8 = "float8_e4m3fn"
_SCALE = ArraySpec((1,), "float32")
_PACKED_LATENTS = ArraySpec((_NUM_BLOCKS, 64, 656), "uint8")


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use."""
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
            topk_indices=ArraySpec((64, 2048), "int32"),
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
