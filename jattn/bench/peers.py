"""The peers of the CUDA benchmarks as plain functions, where they can be imported; none of their code is here."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_core.base.errors import InvalidInput

_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def load_peers(directory: Path | None) -> Any:
    """Imports `bench_peers.py` from a folder with FlashAttention-3 and vLLM's Triton operations; None without one.

    The module has `fa3(q, k, v, ...)`, `vllm_unified(q, k, v, out, ...)` and `vllm_dense(q, k, v, out, ...)`.

    Raises:
        InvalidInput: the module is not in the folder.
    """
    if directory is None:
        return None
    if not (directory / "bench_peers.py").is_file():
        raise InvalidInput(f"--peers {directory}: there is no bench_peers.py in it; name the folder of the peers.")
    sys.path.insert(0, str(directory.resolve()))
    try:
        return importlib.import_module("bench_peers")
    finally:
        sys.path.remove(str(directory.resolve()))


def load_fa4() -> Any:
    """Imports FlashAttention-4 (its package flash-attn-4); None where it is not installed."""
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ImportError:
        return None


def flash_mla_sparse() -> Callable[..., Any]:
    """Returns `flash_mla_sparse_fwd(query, latents, slots, scale)` of FlashMLA, which comes with vLLM.

    Raises:
        ImportError: vLLM, or the part of it in the folder of `load_peers`, cannot be imported.
    """
    return importlib.import_module("vllm.third_party.flashmla.flash_mla_interface").flash_mla_sparse_fwd


def sdpa(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, dropout: float = 0.0
) -> torch.Tensor:
    """Runs torch's scaled_dot_product_attention with one backend ("cudnn" or "flash"), on [batch, heads, n, d]."""
    with sdpa_kernel(_SDPA[backend]):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, enable_gqa=True
        )


def cudnn(query: Any, key: Any, value: Any, starts: Any, length: int, *, fp8: bool = False) -> Any:
    """Causal attention of cuDNN through JAX over sequences of one length, on [tokens, heads, d]; see `dense_in_jax`."""
    rows = [x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value)]
    attend = (
        _cudnn_fp8 if fp8 else functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    )
    out: Any = attend(*rows)
    return out.reshape(*query.shape[:2], -1)


def _cudnn_fp8(query: Any, key: Any, value: Any) -> Any:
    """Runs cuDNN in e4m3 with scales of 1. JAX has it under a private name only; ImportError if it has it no longer."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    scales = dict.fromkeys(fused.fp8_params_keys, jnp.ones((1, 1, 1, 1), jnp.float32))
    # Its own annotations say less than it takes and returns.
    attend: Any = fused.dot_product_attention
    options = {"fp8_params": scales, "use_fp8": True, "mask_type": fused.MaskType.CAUSAL}
    return attend(query, key, value, scale=query.shape[-1] ** -0.5, **options)[0]


def pallas_paged() -> Callable[..., Any]:
    """Returns `paged_attention(query, key_pages, value_pages, block_tables, lengths)` of JAX's Pallas kernels.

    Raises:
        ImportError: this JAX no longer has them (they are deprecated).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def call(query: Any, *arrays: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The kernel leaves the scale to its caller.
            return paged_attention(query * query.shape[-1] ** -0.5, *arrays)

    return call


def xla_gather(query: Any, kv_cache: Any, block_tables: Any) -> Any:
    """Decode as one writes it in jnp: gather the blocks of each (full) sequence, then dense attention."""
    gathered = kv_cache[block_tables]
    key, value = (gathered[:, :, x].reshape(block_tables.shape[0], -1, *kv_cache.shape[3:]) for x in range(2))
    return jax.nn.dot_product_attention(query[:, None], key, value)[:, 0]
