"""Arguments of a wrong type, given to vLLM's operations: refused by their names, and nothing is written."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torch_core.base.errors import InvalidInput, JattnError
from torch_core.vllm import ops
from torch_core.vllm.ops import prefix_prefill, states

ONES = torch.ones


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Returns a valid call of each operation: two tokens of one sequence, heads of 4."""
    q, cache, tables, lens, starts = ONES(2, 1, 4), ONES(2, 4, 1, 4), ints([1]), ints(2), ints(0, 2)
    paged = {
        "q": q, "k": cache, "v": cache, "out": torch.empty_like(q), "cu_seqlens_q": starts, "seqused_k": lens,
        "softmax_scale": 1.0, "causal": True, "window_size": (-1, -1), "block_table": tables, "softcap": 0.0,
        "max_seqlen_q": 2, "q_descale": None, "k_descale": None, "v_descale": None, "alibi_slopes": ONES(1),
        "sinks": ONES(1),
    }  # fmt: skip
    packed = {
        "q": q, "k": q, "v": q, "o": torch.empty_like(q), "b_start_loc": ints(0), "b_seq_len": lens, "max_input_len": 2,
        "softmax_scale": 1.0, "sliding_window_q": 0, "sliding_window_k": 0, "sinks": ONES(1),
    }  # fmt: skip
    merged = {
        "output": torch.empty_like(q), "prefix_output": q, "prefix_lse": ONES(1, 2), "suffix_output": q,
        "suffix_lse": ONES(1, 2), "output_lse": torch.empty(1, 2), "prefill_tokens_with_context": 1,
        "output_scale": None,
    }  # fmt: skip
    write = {"key": q, "value": q, "slot_mapping": ints(4, 5)}
    halves = {"key_cache": torch.zeros(2, 4, 1, 4), "value_cache": torch.zeros(2, 4, 1, 4)}
    stored = {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None}
    by_head = {"k_scale_cache": ONES(2, 4, 1), "v_scale_cache": ONES(2, 4, 1), "kv_quant_mode": None}
    codes = {name: each.to(torch.int8) for name, each in halves.items()}
    decode = {
        "q": q[:1], "k_buffer": cache, "v_buffer": cache, "o": torch.empty(1, 1, 4), "lse": torch.empty(1, 1),
        "req_to_token": tables, "b_seq_len": lens, "attn_logits": None, "num_kv_splits": 1, "sm_scale": 1.0,
        "page_size": 4, "logit_cap": 0.0, "k_scale": None, "v_scale": None,
    }  # fmt: skip
    prefix = {
        "q": q, "k": q, "v": q, "o": torch.empty_like(q), **stored, "k_cache": ONES(2, 1, 4, 4),
        "v_cache": ONES(2, 1, 4, 4), "b_loc": tables, "b_start_loc": starts, "b_seq_len": lens, "max_seq_len": 2,
        "max_input_len": 2, "alibi_slopes": ONES(1), "sliding_window": 0, "sm_scale": 1.0, "sinks": ONES(1),
        "fp8_out_scale": None,
    }  # fmt: skip
    chunked = {
        "query": q, "key": q, "value": q, "output": torch.empty_like(q), **stored, "key_cache": ONES(2, 1, 4, 4),
        "value_cache": ONES(2, 1, 4, 4), "block_table": tables, "query_start_loc": starts, "seq_lens": lens,
        "max_seq_len": 2, "max_query_len": 2, "alibi_slopes": ONES(1), "sliding_window": 0, "sm_scale": 1.0,
        "sinks": ONES(1), "output_scale": None,
    }  # fmt: skip
    rows = ONES(1, 2, 1, 4)
    delta = {
        "q": rows,
        "k": rows,
        "v": rows,
        "g": -ONES(1, 2, 1),
        "beta": ONES(1, 2, 1),
        "scale": 1.0,
        "initial_state": ONES(1, 1, 4, 4),
        "cu_seqlens": starts,
    }
    conv = {"weight": ONES(4, 3), "bias": ONES(4)}
    mamba = {
        "A": -ONES(1),
        "B": ONES(2, 1, 4),
        "C": ONES(2, 1, 4),
        "D": ONES(1),
        "dt_bias": ONES(1),
        "z": q,
        "x": q,
        "dt": ONES(2, 1),
    }
    unused = dict.fromkeys(("chunk_size", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx"))
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (ops.unified_attention, {**paged, "max_seqlen_k": None, "qq_bias": ONES(2, 2), "output_scale": None}),
        (ops.unified_attention_diffkv, paged),
        (ops.context_attention_fwd, packed),
        (ops.merge_attn_states, merged),
        (ops.triton_reshape_and_cache_flash, {**write, **halves, **stored}),
        (ops.triton_reshape_and_cache_flash_diffkv, {**write, "kv_cache": torch.zeros(2, 4, 1, 8), **stored}),
        (ops.triton_reshape_and_cache_flash_per_token_head_quant, {**write, **codes, **by_head}),
        (ops.decode_attention_fwd, decode),
        (prefix_prefill.context_attention_fwd, prefix),
        (ops.chunked_prefill_paged_decode, chunked),
        (states.chunk_gated_delta_rule, {**delta, "core_attn_out": torch.empty_like(rows)}),
        (states.fused_recurrent_gated_delta_rule,
         {**delta, "initial_state": ONES(2, 1, 4, 4), "ssm_state_indices": ints([1, 0]),
          "num_accepted_tokens": ints(1)}),
        (states.causal_conv1d_fn,
         {**conv, "x": ONES(4, 2), "conv_states": ONES(2, 4, 2), "query_start_loc": starts, "cache_indices": ints(1),
          "has_initial_state": torch.tensor([True])}),
        (states.causal_conv1d_update,
         {**conv, "x": ONES(2, 4), "conv_state": ONES(3, 4, 2), "conv_state_indices": ints(1, 2),
          "num_accepted_tokens": ints(1, 1), "query_start_loc": ints(0, 1, 2), "out": torch.empty(2, 4)}),
        (states.mamba_chunk_scan_combined_varlen,
         {**mamba, **unused, "cu_seqlens": starts, "out": torch.empty_like(q), "initial_states": ONES(1, 1, 4, 4),
          "final_states_out": ONES(2, 1, 4, 4), "final_state_indices": ints(1), "state_dtype": None}),
        (states.selective_state_update,
         {**mamba, "state": ONES(3, 1, 4, 4), "state_batch_indices": ints(1, 2), "cu_seqlens": None,
          "out": torch.empty_like(q)}),
    ]  # fmt: skip
    return {
        f"{function.__module__.rsplit('.', 1)[1]}.{function.__name__}": (function, given) for function, given in calls
    }


CALLS = _calls()


@pytest.mark.parametrize("name", CALLS)
def test_a_valid_call_is_taken(name):
    function, given = CALLS[name]
    function(**copy.deepcopy(given))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "value", [[1.0], "no name", object(), np.ones((2, 1, 4))], ids=lambda value: type(value).__name__
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_parameter(name, value):
    function, given = CALLS[name]
    for parameter in inspect.signature(function).parameters.values():
        is_served = isinstance(value, str) and "str" in parameter.annotation
        if parameter.annotation != "Any" and not is_served:
            with pytest.raises(InvalidInput, match=rf"^{parameter.name} "):
                function(**{**copy.deepcopy(given), parameter.name: value})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "value", [ONES(()), ONES(3), ONES(2, 3), ONES(2, 1, 3), ONES(1, 1, 1, 1, 1)], ids=lambda x: x.ndim
)
def test_no_error_of_torch_tells_of_another_shape(name, value):
    function, given = CALLS[name]
    for parameter in inspect.signature(function).parameters:
        with contextlib.suppress(JattnError):
            function(**{**copy.deepcopy(given), parameter: value})
