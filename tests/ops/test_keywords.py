"""Keywords of the public functions: each is in signature and help, is a field of its call, and is known to pyright."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jattn
import jattn.ops
import torch_core.ops
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.options import DenseOptions, LatentOptions, LatentSpecOptions, PagedOptions
from torch_core.latent.call import LatentCall

if TYPE_CHECKING:
    # pyright reads this, and complains where an error is not there any more.
    def _misspelt_keywords(x: jax.Array, t: torch.Tensor) -> None:
        jattn.paged_attention(x, x, x, x, x, max_query_len=1, alibi_slope=x)  # pyright: ignore[reportCallIssue]
        jattn.attention_with_lse(x, x, x, x, max_query_len=1, window=3)  # pyright: ignore[reportCallIssue]
        jattn.mla_attention(x, x, x, x, x, max_query_len=1, scale=0.5, kv_rank=2)  # pyright: ignore[reportCallIssue]
        torch_core.ops.paged_attention(t, t, t, t, t, max_query_len=1, sink=t)  # pyright: ignore[reportCallIssue]
        torch_core.ops.attention(t, t, t, t, t, max_query_len=1, dropout=0.1)  # pyright: ignore[reportCallIssue]

    def _wrong_types(x: jax.Array, t: torch.Tensor) -> None:
        jattn.paged_attention(x, x, x, x, x, max_query_len="1")  # pyright: ignore[reportArgumentType]
        jattn.paged_attention(x, x, x, x, x, max_query_len=1, sinks=3)  # pyright: ignore[reportArgumentType]
        jattn.attention(x, x, x, x, max_query_len=1, sliding_window="3")  # pyright: ignore[reportArgumentType]
        torch_core.ops.paged_attention_with_lse(t, t, t, t, t, max_query_len=1, k_scale=x)  # pyright: ignore[reportArgumentType]
        torch_core.ops.mla_attention(t, t, t, t, t, kv_lora_rank=2, max_query_len=1, causal="no")  # pyright: ignore[reportArgumentType]

    def _right_keywords(x: jax.Array, t: torch.Tensor) -> None:
        jattn.paged_attention(x, (x, x), x, x, x, max_query_len=1, sinks=x, sliding_window=(3, None), k_scale=2.0)
        torch_core.ops.paged_attention(
            query=t, kv_cache=t, block_tables=t, seq_lens=t, query_start_loc=t, max_query_len=1
        )


#: Fields that a function makes itself, or takes by another name or place.
_OWN = {"name", "kv_cache", "key_cache", "value_cache", "max_query_len", "max_key_len", "out", "out_dtype", "with_lse"}
FUNCTIONS = [
    (jattn.paged_attention, PagedOptions, PagedCall),
    (jattn.paged_attention_with_lse, PagedOptions, PagedCall),
    (jattn.attention, DenseOptions, DenseCall),
    (jattn.mla_attention, LatentOptions, LatentCall),
    (jattn.sparse_mla_attention, LatentOptions, LatentCall),
    (torch_core.ops.paged_attention, PagedOptions, PagedCall),
    (torch_core.ops.attention_with_lse, DenseOptions, DenseCall),
    (torch_core.ops.mla_attention, LatentSpecOptions, LatentCall),
]


@pytest.mark.parametrize(("function", "options", "call_class"), FUNCTIONS)
def test_help_names_and_describes_every_keyword(function: Any, options: Any, call_class: Any) -> None:
    parameters, text = inspect.signature(function).parameters, inspect.getdoc(function)
    assert text is not None
    for name in options.__annotations__:
        assert parameters[name].default == call_class.__dataclass_fields__[name].default
        assert parameters[name].annotation not in (inspect.Parameter.empty, "")
    assert [name for name in parameters if f"\n    {name}: " not in text] == []


@pytest.mark.parametrize(("options", "call_class"), [(PagedOptions, PagedCall), (DenseOptions, DenseCall)])
def test_every_field_with_a_default_is_a_keyword(options: Any, call_class: Any) -> None:
    fields = {name for name, field in call_class.__dataclass_fields__.items() if field.kw_only and name not in _OWN}
    assert fields - {"query", "query_start_loc", "block_tables", "seq_lens", "key", "value", "key_start_loc"} == set(
        options.__annotations__
    )


SMALL = [
    jattn.write_kv_cache, jattn.merge_states, jattn.indexer_topk, jattn.ops.rotate_and_write, jattn.ops.fused_experts,
    jattn.ops.route_experts, jattn.ops.causal_conv1d, jattn.ops.gated_delta_rule, jattn.ops.mamba_chunk_scan,
    jattn.ops.write_latent_cache,
    jattn.ops.write_kv_cache_per_token_head, torch_core.ops.write_kv_cache, torch_core.ops.rotate_and_write,
    torch_core.ops.merge_states, torch_core.ops.attention_backward, torch_core.ops.indexer_topk,
    torch_core.ops.write_latent_cache, jattn.ops.add_lora_linear,
]  # fmt: skip


@pytest.mark.parametrize("function", SMALL, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_help_describes_every_argument(function: Any) -> None:
    text = inspect.getdoc(function)
    assert text is not None
    assert [name for name in inspect.signature(function).parameters if f"\n    {name}: " not in text] == []


def test_a_field_of_the_call_that_is_no_keyword_is_refused() -> None:
    query = jnp.ones((1, 1, 8))
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'with_lse'$"):
        jattn.attention(query, query, query, jnp.array([0, 1]), max_query_len=1, with_lse=True)  # pyright: ignore[reportCallIssue]


def test_torch_and_jax_take_the_options_of_a_mask_alike() -> None:
    given: dict[str, Any] = {"scale": 0.5, "causal": False, "sliding_window": (2, 1), "logits_soft_cap": 3.0}
    x, starts = torch.arange(32.0).reshape(4, 1, 8).sin(), torch.tensor([0, 4], dtype=torch.int32)
    ours = torch_core.ops.attention(x, x, x, starts, starts, max_query_len=4, **given)
    y = jnp.asarray(x.numpy())
    theirs = jattn.attention(y, y, y, jnp.asarray(starts.numpy()), max_query_len=4, implementation="torch", **given)
    assert ours.tolist() == theirs.tolist()


def test_a_spec_and_its_parts_are_not_given_together() -> None:
    x, starts = torch.ones(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    spec = torch_core.ops.dense_call(x, x, x, starts, starts, max_query_len=1).spec
    with pytest.raises(jattn.InvalidInput, match="spec is given beside its parts"):
        torch_core.ops.attention(x, x, x, starts, starts, max_query_len=1, spec=spec, causal=False)
