"""The kernels for MaxText: `attention`, a branch of `AttentionOp.apply_attention` for training."""

from __future__ import annotations

from typing import Any

import jax

from jattn.nn import attention_fn
from torch_core.base.errors import Unsupported

_CAUSAL = ("global", "local_sliding", "chunk")


def attention(
    op: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None = None,
    model_mode: str = "train",
    *,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    **others: Any,
) -> jax.Array:
    """Attends as `AttentionOp` does, with gradients: packed segments, sinks, windows, chunks and soft caps.

    docs/howto/rollout.md has the branch in MaxText's `apply_attention`, chosen by `attention="jattn"`, that calls it.

    Windows and chunks count from the first token of a segment (MaxText's chunks count from the row's). Padding, segment
    0, gets 0; MaxText gives it the mean of padding.

    Args:
        op: the `AttentionOp`; its attention_type, sliding_window_size, chunk_attn_window_size, attn_logits_soft_cap,
            and its config's max_segments_per_seq are used.
        query: float[batch, length, num_heads, head_dim], scaled already, as MaxText does it.
        key, value: float[batch, length, num_kv_heads, head_dim].
        decoder_segment_ids: int32[batch, length], 0 for padding; None for whole rows.
        model_mode: "train".
        sinks: float[num_heads], a logit of each head that takes probability from the keys; None for none.
        implementation: as in `jattn.attention`.
        others: further arguments of `apply_attention`, which must be None or False.

    Returns:
        float[batch, length, num_heads, head_dim], normalised.

    Raises:
        Unsupported: another model_mode or attention_type, MoBA, or one of `others` is given.
        InvalidInput: shapes, segments or options that do not fit.
    """
    kind = getattr(op.attention_type, "value", op.attention_type)
    unserved = [name for name, given in others.items() if given is not None and given is not False]
    if getattr(getattr(op, "config", None), "moba", False):
        unserved.append("moba")
    if model_mode != "train" or kind not in (*_CAUSAL, "full") or unserved:
        raise Unsupported(
            f"model_mode is {model_mode!r}, attention_type {kind!r}, and further arguments are {unserved}; this branch "
            f"trains with the types {', '.join((*_CAUSAL, 'full'))} and without further arguments. Use "
            "attention='dot_product'."
        )
    most = getattr(getattr(op, "config", None), "max_segments_per_seq", None)
    return attention_fn(
        query,
        key,
        value,
        is_causal=kind in _CAUSAL,
        segment_ids=decoder_segment_ids,
        max_segments=most if decoder_segment_ids is not None and most is not None and most > 0 else None,
        scale=1.0,
        sliding_window=op.sliding_window_size if kind == "local_sliding" else None,
        attention_chunk=op.chunk_attn_window_size if kind == "chunk" else None,
        logits_soft_cap=op.attn_logits_soft_cap or None,
        sinks=sinks,
        implementation=implementation,
    )
