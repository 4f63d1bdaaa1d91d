"""The op of low-rank adapters."""

from __future__ import annotations

from dataclasses import replace

from torch_core.adapters.call import LoraCall
from torch_core.adapters.tiles import TILE_ROWS, most_tiles
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides

_INDICES = ("token_indices_sorted_by_lora_ids", "lora_token_start_loc", "lora_tiles")

register(
    Op(
        call=LoraCall,
        reference="torch_core.adapters.reference:add_lora_linear",
        cpu="torch_core.adapters.cpu:add_lora_linear",
        plan="torch_core.adapters.kernels.lora.plan:plan_lora",
        serves=(
            compute_dtype("x"),
            strides(contiguous=(*_INDICES, "lora_a", "lora_b")),
            Served("low-rank adapters (add_lora_linear): ranks to 256, joined layers, rows without adapter", ALL),
        ),
    )
)


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of an 8B model with 32 slots of rank 16 and a table of tiles, of Kimi Linear's delta attention,
    of 16 heads of DeepSeek-V3 in the absorbed form, and of Qwen3-30B-A3B's experts with 16 slots.
    """
    return {
        "adapters": _lora(64),
        "adapters without a table": replace(_lora(64), lora_tiles=None),
        "adapters one row": _lora(1),
        "adapters added to results": _lora(64, adds=True),
        "adapters one row down": _lora(1, in_size=12288, output_slices=(4096,)),
        "adapters down": _lora(64, in_size=12288, output_slices=(4096,)),
        "adapters head": _lora(64, output_slices=(128256,), adds=True),
        "adapters prompts": _lora(2048),
        "adapters gate and up": _lora(64, output_slices=(12288, 12288), adds=True, activation="silu"),
        "adapters prompts gate and up": _lora(2048, output_slices=(12288, 12288), adds=True, activation="silu"),
        "adapters rank 64": _lora(64, rank=64),
        "adapters rank 256 prompts": _lora(2048, rank=256),
        "adapters float32": _lora(64, dtype="float32"),
        "adapters six layers": _lora(64, in_size=2304, output_slices=(4096, 4096, 4096, 128, 128, 32)),
        "adapters latent queries": _lora(64, in_size=128, output_slices=(512,), heads=(16, 1), adds=True),
        "adapters latent values": _lora(64, in_size=512, output_slices=(128,), heads=(1, 16), adds=True),
        "adapters experts": _lora(512, num_slots=16 * 128, in_size=2048, output_slices=(768, 768)),
    }


def _lora(
    num_rows: int,
    *,
    in_size: int = 4096,
    output_slices: tuple[int, ...] = (4096, 1024, 1024),
    rank: int = 16,
    num_slots: int = 32,
    dtype: str = "bfloat16",
    adds: bool = False,
    activation: str | None = None,
    heads: tuple[int, int] = (1, 1),
) -> LoraCall[ArraySpec]:
    out_size, num_heads = sum(output_slices), max(heads)
    return LoraCall(
        x=ArraySpec((num_rows, num_heads * in_size), dtype),
        y=ArraySpec((num_rows, num_heads * out_size), dtype) if adds else None,
        lora_a=ArraySpec((num_slots, heads[0] * len(output_slices) * rank, in_size), dtype),
        lora_b=ArraySpec((num_slots, heads[1] * out_size, rank), dtype),
        token_indices_sorted_by_lora_ids=ArraySpec((num_rows,), "int32"),
        lora_token_start_loc=ArraySpec((num_slots + 1,), "int32"),
        lora_tiles=None if num_slots > 64 else ArraySpec((most_tiles(num_rows, num_slots + 1, TILE_ROWS), 32), "int32"),
        output_slices=output_slices,
        num_heads=num_heads,
        activation=activation,
    )
