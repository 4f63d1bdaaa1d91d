"""vLLM's attention of one query of each sequence over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.attention.call import PagedCall
from torch_core.attention.serves import head_size_limit
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.latent.call import LatentCall
from torch_core.launch.tensors import array_spec
from torch_core.ops import run
from torch_core.vllm.ops.arguments import Scale, as_int32, check_shape, one_scale
from torch_core.vllm.ops.parameters import as_in_vllm


@as_in_vllm(q=3, k_buffer=(3, 4), v_buffer=(3, 4), lse=2, req_to_token=(2, 3), b_seq_len=1)
def decode_attention_fwd(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, lse: Tensor, req_to_token: Tensor, b_seq_len: Tensor,
    attn_logits: Any, num_kv_splits: Any, sm_scale: float, page_size: int = 1, logit_cap: float = 0.0,
    k_scale: Scale = None, v_scale: Scale = None, is_mla: bool = False,
) -> None:  # fmt: skip
    """Attends one query of each sequence over a paged cache; writes `o` and `lse`.

    Not used: attn_logits, num_kv_splits. Plain torch computes heads that the kernels do not take, beyond 256 elements
    on CUDA.

    Args:
        q: [num_seqs, num_heads, head_size].
        k_buffer, v_buffer: [num_pages, page_size, num_kv_heads, head_size], or without the first axis split; the head
            sizes may differ.
        o: [num_seqs, num_heads, value_head_size]; written.
        lse: [num_seqs, num_heads], natural log; written.
        req_to_token: integers [num_seqs, pages] or [num_seqs, pages, 1], the pages of each sequence.
        b_seq_len: int32 [num_seqs].
        sm_scale: factor on the scores.
        page_size: tokens of a page.
        logit_cap: soft cap on the scores; 0 for none.
        k_scale, v_scale: dequantisation scales of an 8-bit cache.
        is_mla: `v_buffer` is the first elements of `k_buffer`'s rows, the latents of one head; it is not read.
    """
    check_shape("lse", lse, q.shape[:2])
    k, v = (_as_pages(name, x, page_size) for name, x in (("k_buffer", k_buffer), ("v_buffer", v_buffer)))
    if req_to_token.ndim == 3 and req_to_token.shape[2] == 1:
        req_to_token = req_to_token[..., 0]
    scaled = k.dtype.itemsize == 1
    batch: dict[str, Any] = {
        "query": q,
        "block_tables": as_int32("req_to_token", req_to_token),
        "seq_lens": as_int32("b_seq_len", b_seq_len),
        "query_start_loc": torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device),
        "spec": AttentionSpec(scale=float(sm_scale), logits_soft_cap=float(logit_cap) or None),
        "max_query_len": 1,
        "out": o,
        "with_lse": True,
        "k_scale": one_scale("k_scale", k_scale) if scaled else None,
    }
    if is_mla:
        found = run(LatentCall(latent_cache=k[:, :, 0], kv_lora_rank=v.shape[-1], **batch))
    else:
        v_scale = one_scale("v_scale", v_scale) if scaled else None
        call = PagedCall(key_cache=k, value_cache=v, v_scale=v_scale, **batch)
        is_wide = q.device.type == "cuda" and head_size_limit(call, "triton") is not None
        found = attend_plainly(call, o) if is_wide else run(call)
    lse.copy_(found["lse"])


def attend_plainly(call: PagedCall[Tensor], out: Tensor) -> dict[str, Tensor]:
    """Computes one query of each sequence in plain torch, float32 and one key/value head at a time; waits for nothing.

    The results are those of `run` with this `out`. The keys of a whole row of the tables are gathered.
    """
    call.map(array_spec).check()
    lens, width = call.seq_lens[:, None], call.block_tables.shape[1]
    columns = torch.arange(width * call.block_size, device=lens.device)
    blocks = torch.where(columns[:: call.block_size] < lens, call.block_tables, 0)
    hidden, cap = (columns >= lens)[:, None], call.spec.logits_soft_cap
    scales = [1.0 if scale is None else scale for scale in (call.k_scale, call.v_scale)]
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    for head in range(call.num_kv_heads):
        heads = slice(head * call.group, (head + 1) * call.group)
        key, value = (
            cache[:, :, head][blocks].flatten(1, 2).float() * scale
            for cache, scale in zip(call.caches, scales, strict=True)
        )
        scores = torch.einsum("sgd,skd->sgk", call.query[:, heads].float(), key) * call.spec.scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, heads] = total = scores.logsumexp(-1)
        weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])
        out[:, heads] = torch.einsum("sgk,skd->sgd", weights, value.masked_fill(hidden.mT, 0)).to(out.dtype)
    return {"out": out, "lse": lse}


def _as_pages(name: str, buffer: Tensor, page_size: int) -> Tensor:
    if buffer.ndim == 4:
        return buffer
    if page_size < 1 or buffer.shape[0] % page_size:
        raise InvalidInput(name, f"has {buffer.shape[0]} tokens", f"they must be pages of page_size, {page_size}")
    return buffer.unflatten(0, (-1, page_size))
