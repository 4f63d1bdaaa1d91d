"""Random problems of the backward pass: a dense case with gradients of its results, poisoned where nobody may look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.attention_cases import (
    AttentionCase,
    assert_as_exact,
    assert_matches_reference,
    dense_case,
    random_dense_case,
    to_torch,
)
from tests.support.kernel_cases import wide_case
from torch_core import reference
from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall
from torch_core.attention.reference.masks import visible_keys
from torch_core.base.specs import AttentionSpec

__all__ = [
    "assert_gradients_match",
    "assert_poisoned_match",
    "backward_call",
    "hopper_backward_case",
    "poisoned",
    "random_backward_case",
    "wide_backward_case",
]


def backward_call(
    case: AttentionCase, forward: Callable[[DenseCall[Any]], dict[str, Any]], device: str = "cpu", *, with_d_lse: bool
) -> DenseBackwardCall[torch.Tensor]:
    """Returns the backward call of a dense case after a forward pass; gradients of padding rows are NaN."""
    call = case.call(device)
    results = forward(replace(call, with_lse=True))
    rng = np.random.default_rng([case.seed, 11])
    real = int(case.operands["query_start_loc"][-1])
    d_out = torch.from_numpy(np.clip(rng.standard_normal(results["out"].shape), -4, 4)).to(results["out"])
    d_lse = torch.from_numpy(rng.standard_normal(results["lse"].shape)).to(results["lse"])
    for gradient in (d_out, d_lse):
        gradient[real:] = torch.nan
    return backward_of(call, out=results["out"], lse=results["lse"], d_out=d_out, d_lse=d_lse if with_d_lse else None)


def poisoned(case: AttentionCase) -> AttentionCase:
    """Returns a dense case with NaN in keys and values that no query sees; its results are those of the case itself."""
    operands = {name: case.operands[name].copy() for name in ("key", "value")}
    queries, keys = (np.diff(case.operands[name]).tolist() for name in ("query_start_loc", "key_start_loc"))
    for first, query_len, key_len in zip(case.operands["key_start_loc"], queries, keys, strict=False):
        hidden = ~visible_keys(query_len, key_len, spec=case.spec).any(0).numpy()
        for array in operands.values():
            array[first : first + key_len][hidden] = np.nan
    return replace(case, operands={**case.operands, **operands})


def assert_poisoned_match(
    case: AttentionCase, call: DenseBackwardCall[torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    """Fails unless results and gradients of the `poisoned` form of a case are as exact as those of the case must be."""
    assert call.out is not None
    assert_matches_reference(case, call.out, call.lse)
    clean = call.map(torch.Tensor.cpu).with_arrays({name: to_torch(case.operands[name]) for name in ("key", "value")})
    assert_gradients_match(clean, {name: x.cpu() for name, x in found.items()}, f"case {case.seed}")


def assert_gradients_match(call: DenseBackwardCall[torch.Tensor], found: dict[str, torch.Tensor], what: str) -> None:
    """Fails unless each gradient is as exact as `assert_as_exact` demands, by autograd through the reference."""
    exact = reference.attention_backward(call, compute_dtype=torch.float64)
    same = reference.attention_backward(call, compute_dtype=call.query.dtype)
    assert found.keys() == exact.keys()
    terms, dtype = _sizes_of_terms(call), call.query.dtype
    # Weights come from an lse in float32, whose rounding grows with it: a relative error of the whole gradient.
    largest_lse = call.lse[call.lse.isfinite()].abs().max().item() if call.lse.isfinite().any() else 0.0
    rounding = max(1.0, largest_lse * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps)
    for name, gradient in found.items():
        size = max(terms.get(name, 0.0), rounding * exact[name].abs().max().item() if exact[name].numel() else 0.0)
        assert_as_exact(gradient, exact[name], same[name], dtype, f"{name} of {what}", size)


def random_backward_case(seed: int, max_len: int = 100) -> AttentionCase:
    """Draws a small dense problem with every feature that the kernels differentiate."""
    case = random_dense_case(seed, max_len=max_len)
    for name in ("qq_bias", "relative_bias"):
        case.options.pop(name, None)
    return case


def hopper_backward_case(seed: int, head_sizes: tuple[int, int] | None = None, *, small: bool = False) -> AttentionCase:
    """Draws a dense problem that the Hopper backward kernel serves, of heads of 64 or 128 unless `head_sizes` says it.

    Args:
        seed: of everything.
        head_sizes: elements of a head of keys and of values.
        small: one or two sequences of a third of the length, and few heads.
    """
    rng = np.random.default_rng([seed, 17])
    head_size = int(rng.choice([64, 128]))
    head_size, value_head_size = head_sizes or (head_size, head_size)
    group = int(rng.choice([1, 2] if small else [1, 3, 4]))
    num_seqs = int(rng.choice([1, 2] if small else [1, 3, 40]))
    parts, num_kv_heads = (3, 1) if small else (1, 2)
    longest = 500 // parts if num_seqs < 9 else 100
    key_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs - 1)]
    key_lens.append(int(rng.integers(280 // parts, 700 // parts)))
    query_lens = [min(n, int(rng.choice([0, 1, 70, n]))) for n in key_lens[:-1]]
    query_lens.append(int(rng.integers(256 // parts, 600 // parts)))
    causal = bool(rng.random() < 0.6)
    sizes: dict[str, Any] = {
        "num_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "value_head_size": value_head_size,
        "dtype": str(rng.choice(["bfloat16", "float16"])),
        "spec": AttentionSpec(
            scale=head_size**-0.5,
            causal=causal,
            window_left=int(rng.choice([256, 319, 320, 400])) if rng.random() < 0.3 else None,
            window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
        ),
        "padding_tokens": int(rng.choice([0, 1, 40])),
        "values": str(rng.choice(["gaussian", "sparse"], p=[0.8, 0.2])),
    }
    if rng.random() < 0.3:
        sizes["sinks"] = rng.standard_normal(num_kv_heads * group).astype(np.float32)
    case = dense_case(seed, key_lens=key_lens, query_lens=query_lens, **sizes)
    # Shorter queries do not go to the kernel; the bound may be larger than they are.
    return replace(case, limits={**case.limits, "max_query_len": max(256, case.limits["max_query_len"])})


def wide_backward_case(seed: int) -> AttentionCase:
    """Draws a dense problem with every head size and group size that the kernels claim, up to 300 tokens.

    Three seeds share what kernels are compiled for: on a GPU that takes longer than all the rest.
    """
    drawn = wide_case(seed // 3)
    rng = np.random.default_rng([seed, 13])
    num_seqs = drawn.operands["query_start_loc"].shape[0] - 1
    longest = 300 if num_seqs < 9 else 60
    query_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs)]
    key_lens = query_lens if rng.random() < 0.6 else [int(rng.integers(0, longest)) for _ in query_lens]
    _, num_heads, head_size = drawn.operands["query"].shape
    dtype = drawn.operands["query"].dtype.name
    num_kv_heads = drawn.operands["key"].shape[1] if not drawn.paged else drawn.operands["kv_cache"].shape[3]
    # Scores of thousands overflow in torch's fp16, and in fp32 an lse loses more digits there than a difference.
    values = str(rng.choice(["gaussian", "sparse", "large" if dtype == "bfloat16" else "gaussian"], p=[0.7, 0.2, 0.1]))
    options = {name: drawn.options[name] for name in ("alibi_slopes", "sinks") if name in drawn.options}
    return dense_case(
        seed,
        key_lens=key_lens,
        query_lens=query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=(32, 64, 128, 192)[seed // 3 % 4] if seed // 3 % 5 == 0 else None,
        dtype=dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16",
        spec=drawn.spec,
        padding_tokens=int(rng.choice([0, 1, 40])),
        values=values,
        **options,
    )


def _sizes_of_terms(call: DenseBackwardCall[torch.Tensor]) -> dict[str, float]:
    """Returns how large the terms of the gradients are that are differences: d_out * value, and its mean over a row."""
    real, keys = int(call.query_start_loc[-1]), int(call.key_start_loc[-1])
    if real == 0 or keys == 0:
        return {}
    spread = call.value[:keys].double().square().max()
    products = call.d_out[:real].double().square().sum(-1) * spread
    if call.d_lse is not None:
        products = products + call.d_lse[:real].double().square().masked_fill(call.lse[:real].isinf(), 0)
    row, scale = products.max().sqrt().item(), abs(call.spec.scale)
    # Over the rows of a head the errors add up as a random walk.
    head = products.sum(0).max().sqrt().item()
    return {
        "d_query": scale * row * call.key[:keys].abs().max().item(),
        "d_key": scale * row * call.query[:real].abs().max().item(),
        "d_alibi_slopes": head * max(call.max_query_len, call.max_key_len or keys),
        "d_sinks": head,
    }
