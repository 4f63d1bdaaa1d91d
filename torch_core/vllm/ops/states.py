"""vLLM's operations of layers with a recurrent state: the gated delta rule, short convolutions, Mamba-2.

With a slot for each drafted token (`ssm_state_indices`, `conv_state_indices` or `state_batch_indices` of two axes), a
sequence starts from the state after its accepted tokens of the last step, and the state after each of its tokens is
kept. The kernels keep one state of a sequence, so that each token of such a step is a launch. `num_kept_tokens` of
this project's own operations verifies drafts with one slot and two launches.

Signatures are those of vLLM 0.33. Some arrays there are plans of its kernels, which these operations do not use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.ops import run
from torch_core.state.conv_call import CausalConvCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall
from torch_core.vllm.ops.arguments import as_int32, check_shape, refuse_option
from torch_core.vllm.ops.parameters import as_in_vllm

#: vLLM's `NULL_BLOCK_ID` and `PAD_SLOT_ID`: slots of padding.
NULL_BLOCK_ID = 0
PAD_SLOT_ID = -1


@as_in_vllm(q=4, k=4, v=4, g=3, beta=3, cu_seqlens=1)
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    chunk_indices: Any = None, chunk_offsets: Any = None, use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the results [batch, tokens, heads, value_size], and the state after each sequence or None.

    Not used: chunk_indices, chunk_offsets.

    Args:
        q, k: [batch, tokens, key heads, key_size]; one batch with cu_seqlens.
        v: [batch, tokens, heads, value_size].
        g, beta: [batch, tokens, heads].
        scale: factor of the results; `key_size**-0.5` when None.
        initial_state: [num_seqs, heads, value_size, key_size]; zeros when None.
        output_final_state: return the states, in float32.
        cu_seqlens: integers [num_seqs + 1]; None for sequences of equal length.
        use_qk_l2norm_in_kernel: divide queries and keys by their norms.
        core_attn_out: as many elements as the results, which are written there too.
    """
    if core_attn_out is not None and core_attn_out.numel() != v.numel():
        raise InvalidInput("core_attn_out", f"has {core_attn_out.numel()} elements", f"it must have {v.numel()}, as v")
    call = _delta_call(q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel)
    shape = (call.num_seqs, call.num_heads, v.shape[3], k.shape[3])
    states = torch.zeros(shape, dtype=torch.float32, device=q.device)
    if initial_state is not None:
        check_shape("initial_state", initial_state, shape)
        states.copy_(initial_state)
    out = run(call.with_arrays({"states": states}))["out"].view(v.shape)
    if core_attn_out is not None:
        core_attn_out.view(v.shape).copy_(out)
    return out, states if output_final_state else None


@as_in_vllm(q=4, k=4, v=4, g=3, beta=3, cu_seqlens=1, initial_state=4, ssm_state_indices=(1, 2), num_accepted_tokens=1)
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, inplace_final_state: bool = True, cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the results and `initial_state`, which has the new states; see `chunk_gated_delta_rule`.

    Args:
        beta: ones when None.
        initial_state: [num_slots, heads, value_size, key_size]; written.
        inplace_final_state: True.
        ssm_state_indices: integers [num_seqs], the slots; or [num_seqs, tokens], that of each drafted token. Those
            below 1 are padding.
        num_accepted_tokens: integers [num_seqs]; those of the last step, the sampled one included.
    """
    refuse_option("inplace_final_state", inplace_final_state, True, "states are updated in place")
    if initial_state is None:
        raise InvalidInput("initial_state", value=None, wanted="give the states, which are updated in place")
    beta = torch.ones_like(g) if beta is None else beta
    call = _delta_call(q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel)
    names = ("query", "key", "value", "beta", "g")
    slots = _slots("ssm_state_indices", ssm_state_indices, initial_state, NULL_BLOCK_ID)
    out = _with_slots(call.with_arrays({"states": initial_state}), names, slots, num_accepted_tokens)
    return out.view(v.shape), initial_state


@as_in_vllm(x=2, conv_states=3, query_start_loc=1)
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    cache_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu", pad_slot_id: int = PAD_SLOT_ID, null_block_id: int = NULL_BLOCK_ID,
    metadata: Any = None, validate_data: Any = False,
) -> Tensor:  # fmt: skip
    """Returns the convolution of sequences side by side, [channels, tokens]. Not used: metadata, validate_data.

    Args:
        x: [channels, tokens]; the transpose of rows of tokens.
        weight: [channels, width].
        bias: [channels].
        conv_states: [num_slots, channels, width - 1], the transpose of rows of inputs; written.
        query_start_loc: integers [num_seqs + 1].
        cache_indices: integers [num_seqs], the slots.
        has_initial_state: bool [num_seqs].
        activation: "silu", "swish", True for silu, or None.
        pad_slot_id, null_block_id: slots of padding.
    """
    call = CausalConvCall(
        x=x.mT.contiguous(),
        weight=weight,
        bias=bias,
        query_start_loc=as_int32("query_start_loc", query_start_loc),
        conv_states=conv_states.mT,
        cache_indices=_slots("cache_indices", cache_indices, conv_states, null_block_id, pad_slot_id),
        has_initial_state=has_initial_state,
        activation=_activation(activation),
    )
    return run(call)["out"].mT


@as_in_vllm(x=(2, 3), conv_state=3, weight=2, query_start_loc=1, conv_state_indices=(1, 2), num_accepted_tokens=1)
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None, max_query_len: Any = -1, null_block_id: int = NULL_BLOCK_ID,
    validate_data: Any = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the convolution of the next tokens of each sequence, as `x`. Not used: max_query_len, validate_data.

    Without `out` vLLM overwrites `x`; here it stays.

    Args:
        x: [num_seqs, channels], [num_seqs, channels, tokens], or [tokens, channels] with query_start_loc.
        conv_state: [num_slots, channels, state_len]; written. With num_accepted_tokens it has the inputs before the
            accepted ones and all inputs of the last step, `width - 2 + tokens` of them; otherwise `width - 1`.
        weight: [channels, width].
        bias: [channels].
        activation: "silu", "swish", True for silu, or None.
        conv_state_indices: integers [num_seqs], the slots; of several columns the first is read.
        num_accepted_tokens: integers [num_seqs]; those of the last step, the sampled one included.
        query_start_loc: integers [num_seqs + 1].
        null_block_id: slot of padding.
        out: like x; written.
    """
    if out is not None:
        check_shape("out", out, x.shape)
    rows = x.mT.reshape(-1, x.shape[1]) if x.ndim == 3 else x
    if query_start_loc is None:
        step = x.shape[2] if x.ndim == 3 else 1
        query_start_loc = torch.arange(0, len(rows) + 1, step, dtype=torch.int32, device=x.device)
    if conv_state_indices is not None and conv_state_indices.ndim == 2:
        conv_state_indices = conv_state_indices[:, 0]
    slots, past = _slots("conv_state_indices", conv_state_indices, conv_state, null_block_id), weight.shape[1] - 1
    call = CausalConvCall(
        x=rows.contiguous(),
        weight=weight,
        bias=bias,
        query_start_loc=as_int32("query_start_loc", query_start_loc),
        conv_states=conv_state.mT,
        cache_indices=slots,
        activation=_activation(activation),
    )
    if num_accepted_tokens is not None:
        starts = call.query_start_loc.long()
        check_shape("num_accepted_tokens", num_accepted_tokens, (call.num_seqs,))
        _check_most("num_accepted_tokens", num_accepted_tokens, conv_state.shape[2] - past + 1)
        held = _last_inputs(call, conv_state, num_accepted_tokens)
        found = run(call.with_arrays({"conv_states": held.clone(), "cache_indices": None}))["out"]
        # The inputs before the new ones, and these, as many as the state has places for.
        tokens = starts[:-1, None] + torch.arange(conv_state.shape[2] - past + 1, device=x.device)
        new = rows[tokens.clamp(max=len(rows) - 1)].to(conv_state.dtype)
        _write_slots(conv_state, slots, torch.cat([held[:, 1:], new], 1).mT)
    else:
        if conv_state.shape[2] != past:
            raise InvalidInput("conv_state", f"holds {conv_state.shape[2]} inputs", f"{past} are needed")
        found = run(call)["out"]
    found = found.view(x.shape[0], -1, x.shape[1]).mT if x.ndim == 3 else found
    return found if out is None else out.copy_(found)


@as_in_vllm(x=3, B=3, cu_seqlens=1, final_states_out=4, final_state_indices=1)
def mamba_chunk_scan_combined_varlen(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: Any, cu_seqlens: Tensor,
    cu_chunk_seqlens: Any, last_chunk_indices: Any, seq_idx: Any, out: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False, state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None, final_state_indices: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes `out` and returns the state after each sequence, [num_seqs, heads, head_dim, state_size].

    Not used: chunk_size, cu_chunk_seqlens, last_chunk_indices, seq_idx.

    Args:
        x: [tokens, heads, head_dim].
        dt: [tokens, heads].
        A: [heads].
        B, C: [tokens, groups, state_size].
        cu_seqlens: integers [num_seqs + 1].
        out: like x; written.
        D, dt_bias: [heads].
        z: like x; the results are multiplied by its silu.
        initial_states: [num_seqs, heads, head_dim, state_size]; zeros when None.
        dt_softplus, dt_limit: as in `torch_core.state.mamba_call.MambaChunkScanCall`.
        return_intermediate_states: False.
        state_dtype: dtype of the states that are returned; that of x when None.
        final_states_out: [num_slots, heads, head_dim, state_size]; the states are written there, and None is returned.
        final_state_indices: integers [num_seqs], the slots of these states.
    """
    if (final_states_out is None) != (final_state_indices is None):
        name = "final_states_out" if final_states_out is None else "final_state_indices"
        raise InvalidInput(name, value=None, wanted="final_states_out and final_state_indices come together")
    refuse_option(
        "return_intermediate_states", return_intermediate_states, False, "states within a prompt are not kept"
    )
    shape = (cu_seqlens.shape[0] - 1, *x.shape[1:], B.shape[2])
    states = torch.zeros(shape, dtype=torch.float32, device=x.device)
    if z is not None:
        check_shape("z", z, x.shape)
    if final_states_out is not None and final_state_indices is not None:
        check_shape("final_states_out", final_states_out, (len(final_states_out), *shape[1:]))
        check_shape("final_state_indices", final_state_indices, shape[:1])
        final_state_indices = _slots("final_state_indices", final_state_indices, final_states_out)
    if initial_states is not None:
        check_shape("initial_states", initial_states, shape)
        states.copy_(initial_states)
    call = MambaChunkScanCall(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        D=_of_heads("D", D, x.shape[1]),
        dt_bias=dt_bias,
        query_start_loc=as_int32("cu_seqlens", cu_seqlens),
        states=states,
        max_query_len=max(1, len(x)),
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        out=out,
    )
    run(call)
    if z is not None:
        out.copy_(out.float() * functional.silu(z.float()))
    if final_states_out is None or final_state_indices is None:
        return states.to(state_dtype or x.dtype)
    _write_slots(final_states_out, final_state_indices, states)
    return None


@as_in_vllm(state=4, x=3, dt=(2, 3), state_batch_indices=(1, 2), num_accepted_tokens=1, cu_seqlens=1)
def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    z: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None, dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID, out: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None, is_blackwell: Any = False, enable_stochastic_rounding: bool = False,
    cache_philox_rounds: Any = 0,
) -> Tensor:  # fmt: skip
    """Returns the results of Mamba-2's next tokens, one of each sequence without cu_seqlens.

    Not used: is_blackwell, cache_philox_rounds.

    Args:
        state: [num_slots, heads, head_dim, state_size]; written.
        x: [tokens, heads, head_dim].
        dt, dt_bias, A, D: numbers of heads, as views that repeat them along head_dim and state_size; dt_bias and D may
            be None.
        B, C: [tokens, groups, state_size].
        z: like x; the results are multiplied by its silu.
        dt_softplus: the step size is the softplus of `dt + dt_bias`.
        state_batch_indices: integers [num_seqs], the slots; or [num_seqs, tokens], that of each drafted token.
        dst_state_batch_indices: None; or with slots of drafted tokens the same array.
        null_block_id: slot of padding.
        out: like x; written.
        num_accepted_tokens: integers [num_seqs]; those of the last step, the sampled one included.
        cu_seqlens: integers [num_seqs + 1].
        enable_stochastic_rounding: False.

    Raises:
        Unsupported: numbers that differ within a head, as Mamba-1's.
    """
    refuse_option("enable_stochastic_rounding", enable_stochastic_rounding, False, "states are rounded to the nearest")
    if dst_state_batch_indices is not None and dst_state_batch_indices is not state_batch_indices:
        raise Unsupported("dst_state_batch_indices", "is another array", "a state is replaced in its own slot")
    for name, each in (("out", out), ("z", z)):
        if each is not None:
            check_shape(name, each, x.shape)
    heads = x.shape[1]
    starts = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device) if cu_seqlens is None else cu_seqlens
    call = MambaChunkScanCall(
        x=x,
        dt=dt if dt.ndim == 2 else _repeated("dt", dt)[:, :, 0],
        A=_of_heads("A", A, heads),
        B=B,
        C=C,
        D=_of_heads("D", D, heads),
        dt_bias=_of_heads("dt_bias", dt_bias, heads),
        query_start_loc=as_int32("cu_seqlens", starts),
        states=state,
        max_query_len=1 if cu_seqlens is None else max(1, len(x)),
        dt_softplus=dt_softplus,
    )
    slots = _slots("state_batch_indices", state_batch_indices, state, null_block_id)
    found = _with_slots(call, ("x", "dt", "B", "C"), slots, num_accepted_tokens)
    if z is not None:
        found = (found.float() * functional.silu(z.float())).to(found.dtype)
    return found if out is None else out.copy_(found)


def _delta_call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
) -> GatedDeltaCall[Tensor]:  # fmt: skip
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * length + 1, max(length, 1), dtype=torch.int32, device=q.device)
    elif batch != 1:
        raise InvalidInput("q", f"has a batch of {batch}", "with cu_seqlens it must be 1")
    query, key, value, step, gate = (each.flatten(0, 1) for each in (q, k, v, beta, g))
    return GatedDeltaCall(
        query=query,
        key=key,
        value=value,
        beta=step,
        g=gate,
        query_start_loc=as_int32("cu_seqlens", cu_seqlens),
        max_query_len=max(1, length),
        scale=k.shape[3] ** -0.5 if scale is None else float(scale),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def _with_slots(call: Any, names: tuple[str, ...], slots: Tensor | None, num_accepted: Tensor | None) -> Tensor:
    """Runs a call with states in slots, or in a slot of each token; `names` are its arrays of tokens."""
    slots = slots[:, 0] if slots is not None and slots.ndim == 2 and slots.shape[1] == 1 else slots
    if slots is None or slots.ndim == 1:
        return run(call.with_arrays({"cache_indices": slots}))["out"]
    if num_accepted is not None:
        check_shape("num_accepted_tokens", num_accepted, slots.shape[:1])
    states, starts, last = call.states, call.query_start_loc.long(), slots.shape[1] - 1
    lens, rows = starts.diff(), torch.arange(len(slots), device=slots.device)
    first = torch.zeros_like(rows) if num_accepted is None else num_accepted.long() - 1
    before = slots[rows, first.clamp(0, last)].long()
    ones = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    out = torch.zeros_like(call.value if isinstance(call, GatedDeltaCall) else call.x)
    for step in range(slots.shape[1]):
        live, own = lens > step, slots[:, step]
        is_kept = live & (own >= 0) & (before >= 0)
        # A row without a token or a slot keeps the state that it has.
        target = torch.where(is_kept, own.long(), before.clamp(min=0))
        states[target] = states[before.clamp(min=0)]
        tokens = (starts[:-1] + step).clamp(max=max(len(out) - 1, 0))
        some = {name: getattr(call, name)[tokens].contiguous() for name in names}
        indices = torch.where(is_kept, own, -1)
        found = run(call.with_arrays({**some, "query_start_loc": ones, "cache_indices": indices}))["out"]
        out[tokens[live]] = found[live]
        before = torch.where(is_kept, own.long(), before)
    return out


def _last_inputs(call: CausalConvCall[Tensor], conv_state: Tensor, num_accepted: Tensor) -> Tensor:
    """Returns the inputs before the new tokens, [num_seqs, width - 1, channels]."""
    slots = call.cache_indices
    places = torch.arange(call.num_seqs, device=conv_state.device) if slots is None else slots.long().clamp(min=0)
    columns = num_accepted.long().clamp(min=1)[:, None] - 1 + torch.arange(call.width - 1, device=conv_state.device)
    held = conv_state[places].mT
    return held.gather(1, columns[..., None].expand(-1, -1, held.shape[2]))


def _write_slots(states: Tensor, slots: Tensor | None, rows: Tensor) -> None:
    """Writes rows to slots, in order without any; those of padding, whose slots are negative, change nothing.

    The device is not waited for, so that CUDA graphs can hold it: padding writes what slot 0 will have.
    """
    rows = rows.to(states.dtype)
    if slots is None:
        states[: len(rows)] = rows
    elif len(rows):
        is_first = slots == 0
        kept = torch.where(is_first.any(), rows[is_first.int().argmax()], states[0])
        is_padding = (slots < 0).view(-1, *[1] * (rows.ndim - 1))
        states[slots.long().clamp(min=0)] = torch.where(is_padding, kept, rows)


def _slots(name: str, slots: Tensor | None, states: Tensor, *padding: int) -> Tensor | None:
    """Returns slots as int32, -1 for those of padding, which are never written."""
    if slots is None:
        return None
    found = as_int32(name, slots)
    _check_most(name, found, states.shape[0] - 1)
    for each in padding:
        found = torch.where(found == each, -1, found)
    return found


def _check_most(name: str, values: Tensor, most: int) -> None:
    """Raises InvalidInput for a larger value, where values are checked."""
    if values.device.type == "cpu" and len(large := (values > most).nonzero()):
        first = large[0].tolist()
        raise InvalidInput(f"{name}{first}", value=values[tuple(first)].item(), wanted=f"it must be at most {most}")


def _activation(activation: str | bool | None) -> str | None:
    return "silu" if activation in (True, "swish") else activation or None  # type: ignore[return-value]


def _repeated(name: str, array: Tensor) -> Tensor:
    if any(stride for stride, size in zip(array.stride()[-1:], array.shape[-1:], strict=True) if size > 1):
        raise Unsupported(name, "differs within a head", "Mamba-2's numbers are those of heads, repeated by a view")
    return array


def _of_heads(name: str, array: Tensor | None, heads: int) -> Tensor | None:
    """Returns [heads] of a view that repeats the numbers of heads along further axes."""
    while array is not None and array.ndim > 1:
        array = _repeated(name, array)[..., 0]
    if array is not None and array.shape != (heads,):
        raise InvalidInput(name, f"has shape {list(array.shape)}", f"it must be of {heads} heads")
    return array
