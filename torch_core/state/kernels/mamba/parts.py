"""What the plans of Mamba-2 and of its derivative share: spans, scratch, arguments."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, Pointer, Scalar
from torch_core.state.mamba_call import MambaChunkScanCall

#: Tokens of a span of all tokens of a sequence.
WHOLE = 1 << 30
#: Matrix units take 16 rows and columns and more.
LEAST_TILE = 16
#: Rows of a state in a program that passes states on, which waits for memory alone.
PASSED_ROWS = 8
#: States of more columns let the compiler spill some registers.
UNSPILT_STATE = 128
#: Tokens of a span; one of few numbers, so that few variants are compiled. A sequence in one span needs no launches for
#: its spans' states, in several it fills the device.
SPANS = (8192, 2048, 512)
# Heads of a group whose step sizes are computed together.
_HEADS = 32
_PADDED_ROWS = 16
# The largest float32 stands for infinity.
_LARGEST = 3.4028234663852886e38


def constexprs_of(call: MambaChunkScanCall[ArraySpec], chunk: int, least: int) -> dict[str, Any]:
    """Returns the compile-time parameters of all kernels; `least` is the smallest padded size."""
    group = call.num_heads // call.num_kv_heads
    return {
        "NUM_HEADS": call.num_heads,
        "NUM_GROUPS": call.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": call.x.shape[2],
        "STATE_SIZE": call.state_size,
        "STATE_PADDED": max(least, power_of_two(call.state_size)),
        "SOFTPLUS": call.dt_softplus,
        "DT_COLUMN": call.dt_column or 0,
        "LOG_RATES": call.log_rates,
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_HEADS": min(_HEADS, power_of_two(group)),
        "BLOCK_T": _PADDED_ROWS,
        "CHUNK": chunk,
        # Errors of a product are then small beside a rounding to the operands' type.
        "PRECISION": "tf32" if call.x.dtype == "bfloat16" else "tf32x3",
    }


def tiles_of(call: MambaChunkScanCall[ArraySpec], tokens: int) -> int:
    """Returns a bound of the number of tiles of some tokens."""
    return call.num_tokens // tokens + call.num_seqs


def span_of(call: MambaChunkScanCall[ArraySpec], limits: DeviceLimits, programs: int, *, resident: int) -> int:
    """Returns the tokens of a span, given the programs of one sequence in one span, and those of a multiprocessor."""
    # In a batch of equal sequences as long as the bound, all run at the same time; another batch may be one sequence.
    is_even = call.num_tokens == call.num_seqs * call.max_query_len
    wanted = resident * limits.num_sms / (programs * (call.num_seqs if is_even else 1))
    fitting = [span for span in SPANS if span < call.max_query_len]
    if wanted <= 1 or not fitting:
        return WHOLE
    return next((span for span in fitting if wanted * span <= call.max_query_len), fitting[-1])


def scratch_of(
    call: MambaChunkScanCall[ArraySpec], chunk: int, span: int, num_spans: int, directions: int = 1
) -> dict[str, ArraySpec]:
    """Returns the scratch of what does not depend on a state, and of the states of as many spans."""
    by_head = (call.num_heads, call.num_tokens)
    scratch = {
        # float16 would overflow.
        "products": ArraySpec(
            (call.num_tokens, call.num_kv_heads, chunk), "bfloat16" if call.x.dtype == "bfloat16" else "float32"
        ),
        "steps": ArraySpec(by_head, "float32"),
        "decays": ArraySpec(by_head, "float32"),
    }
    if span != WHOLE:
        spans = (num_spans, call.num_heads, directions)
        scratch["span_states"] = ArraySpec((*spans, call.x.shape[2], call.state_size), "float32")
        scratch["span_decays"] = ArraySpec(spans, "float32")
    return scratch


def arguments_of(
    call: MambaChunkScanCall[ArraySpec], arrays: dict[str, ArraySpec], made: dict[str, ArraySpec]
) -> dict[str, Argument]:
    """Returns the arguments by name; `made` are the buffers that the launches write, besides the states."""
    absent = ArraySpec((1, 1, 1, 1), "float32")
    optional = ("D", "dt_bias", "cache_indices", "has_initial_state", "num_kept_tokens", "states", "span_states")
    least, largest = (min(each, _LARGEST) for each in call.dt_limit)
    return {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *made)},
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.states is None else call.states.shape[0], "i32", specialize=False),
        "least_step": Scalar(least, "fp32"),
        "largest_step": Scalar(largest, "fp32"),
        **strides("x", ("token", "head"), call.x),
        **strides("dt", ("token",), call.dt),
        **strides("B", ("token", "group"), call.B),
        **strides("C", ("token", "group"), call.C),
        **strides("states", ("slot", "head", "row"), arrays.get("states", absent)),
        **strides("out", ("token", "head"), made.get("out", absent)),
    }
