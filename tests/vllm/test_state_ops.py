"""vLLM's operations of layers with a state: the results of this project's own, and a slot for each drafted token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.conv_cases import conv_call
from tests.support.delta_cases import delta_call
from tests.support.mamba_cases import mamba_call
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.ops import run
from torch_core.vllm.ops import states as ops

LENS = (5, 1, 3)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def delta(seed: int, lens: tuple[int, ...] = LENS) -> tuple[Any, list[Any]]:
    """Returns a call whose sequences have the slots 1, 2 and so on, and its arrays with vLLM's axis of the batch."""
    call = delta_call(seed, lens, padding=0)
    states = torch.randn(len(call.states) + 4, *call.states.shape[1:])
    slots = torch.arange(1, len(lens) + 1, dtype=torch.int32)
    call = call.with_arrays({"states": states, "cache_indices": slots, "has_initial_state": None})
    return call, [each[None] for each in (call.query, call.key, call.value, call.g, call.beta)]


def test_the_gated_delta_rule_of_prompts_and_of_slots(seed):
    call, arrays = delta(seed)
    given = {"cu_seqlens": call.query_start_loc.long(), "use_qk_l2norm_in_kernel": True}
    first = call.states[call.cache_indices].clone()
    last: Any
    out, last = ops.chunk_gated_delta_rule(*arrays, initial_state=first, output_final_state=True, **given)
    slots, states = call.cache_indices, call.states.clone()
    again, _ = ops.fused_recurrent_gated_delta_rule(*arrays, initial_state=states, ssm_state_indices=slots, **given)

    padded = torch.where(slots == 1, 0, slots), call.states.clone()
    ops.fused_recurrent_gated_delta_rule(*arrays, initial_state=padded[1], ssm_state_indices=padded[0], **given)
    assert_close(padded[1][:2], call.states[:2])
    written = torch.empty(call.value.shape)
    ops.chunk_gated_delta_rule(*arrays, initial_state=first, core_attn_out=written, **given)

    expected = run(call)["out"]

    assert_close(written, expected)
    assert_close(out[0], expected)
    assert_close(last, call.states[slots])
    assert_close(again[0], expected)
    assert_close(states, call.states)


def test_a_delta_rule_with_a_slot_for_each_token_starts_after_the_accepted_ones(seed):
    call, arrays = delta(seed, (3, 3))
    slots = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    states, accepted = call.states.clone(), torch.tensor([2, 3], dtype=torch.int32)
    out, _ = ops.fused_recurrent_gated_delta_rule(
        *arrays,
        initial_state=states,
        cu_seqlens=call.query_start_loc,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )

    for kept in (1, 2, 3):
        given = call.map(torch.clone)
        first = given.states[torch.tensor([2, 6])].clone()
        wanted = given.with_arrays({"states": first, "cache_indices": None})
        wanted = wanted.with_arrays({"num_kept_tokens": torch.tensor([kept, kept], dtype=torch.int32)})
        assert_close(out[0], run(wanted)["out"])
        assert_close(states[slots[:, kept - 1].long()], first)


def test_convolutions_of_prompts_and_of_decoded_tokens(seed):
    call = conv_call(seed, LENS, padding=0).with_arrays({"has_initial_state": torch.tensor([True, False, True])})
    held = torch.randn(call.conv_states.shape)
    call = call.with_arrays({"conv_states": held, "cache_indices": torch.tensor([1, 4, 2], dtype=torch.int32)})
    states = held.clone().mT
    out = ops.causal_conv1d_fn(
        call.x.T, call.weight, call.bias, states, call.query_start_loc, call.cache_indices, call.has_initial_state
    )
    assert_close(out.T, run(call)["out"])
    assert_close(states.mT, call.conv_states)
    before, nowhere = states.clone(), torch.tensor([0, -1, -7], dtype=torch.int32)
    ops.causal_conv1d_fn(call.x.T, call.weight, None, states, call.query_start_loc, nowhere, None, True, -7)
    assert_close(states, before)

    one = call.with_arrays({"x": call.x[:3], "query_start_loc": torch.arange(4).int(), "has_initial_state": None})
    found = ops.causal_conv1d_update(one.x, states, one.weight, one.bias, "silu", one.cache_indices)
    assert_close(found, run(one)["out"])
    assert_close(states.mT, one.conv_states)
    out = torch.empty_like(one.x)
    assert ops.causal_conv1d_update(one.x, states, one.weight, one.bias, True, one.cache_indices, out=out) is out
    assert_close(out, run(one)["out"])


def test_a_convolution_of_drafts_starts_after_the_accepted_ones(seed):
    call = conv_call(seed, (9,), padding=0, states=False)
    expected, past, tokens = run(call)["out"], call.width - 1, 3
    state = torch.zeros(2, call.x.shape[1], past - 1 + tokens)
    start, accepted = 0, 1
    # Two of three tokens are accepted, then all three.
    for kept in (2, 3, 1):
        x = call.x[start : start + tokens].T[None]
        found = ops.causal_conv1d_update(
            x,
            state,
            call.weight,
            call.bias,
            "silu",
            torch.tensor([1], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
        )
        assert_close(found[0].T, expected[start : start + tokens])
        start, accepted = start + kept, kept


def test_padding_writes_no_state(seed):
    torch.manual_seed(seed)
    state, x, weight = torch.randn(4, 3, 4), torch.randn(3, 3, 2), torch.randn(3, 4)
    for slots in ([2, -1, 1], [2, -1, 0]):
        old, new = state.clone(), state.clone()
        slots, accepted = torch.tensor(slots), torch.ones(3, dtype=torch.int32)
        options = {"conv_state_indices": slots, "num_accepted_tokens": accepted, "null_block_id": -1}
        ops.causal_conv1d_update(x, new, weight, **options)
        for slot in range(4):
            assert torch.equal(new[slot], old[slot]) == (slot not in slots.tolist())

    x, final = torch.randn(3, 2, 4), torch.zeros(4, 2, 4, 5)
    starts, unused = torch.tensor([0, 2, 3], dtype=torch.int32), torch.empty(0)
    ops.mamba_chunk_scan_combined_varlen(
        x, torch.rand(3, 2), -torch.rand(2), torch.randn(3, 1, 5), torch.randn(3, 1, 5), 8, starts, unused, unused,
        unused, torch.empty_like(x), final_states_out=final, final_state_indices=torch.tensor([2, -1]),
    )  # fmt: skip
    assert [bool(each.any()) for each in final] == [False, False, True, False]


def test_mamba2_of_prompts_and_of_decoded_tokens(seed):
    call = mamba_call(seed, LENS, padding=0).with_arrays({"cache_indices": None, "has_initial_state": None})
    call = call.with_arrays({"states": torch.randn(len(LENS), *call.states.shape[1:])})
    out, z = torch.empty_like(call.x), torch.randn(call.x.shape)
    unused = torch.empty(0)
    given = {"D": call.D, "dt_bias": call.dt_bias, "dt_softplus": call.dt_softplus}
    last: Any = ops.mamba_chunk_scan_combined_varlen(
        call.x, call.dt, call.A, call.B, call.C, 4, call.query_start_loc, unused, unused, unused, out, z=z,
        initial_states=call.states.clone(), **given,
    )  # fmt: skip
    assert_close(out, run(call)["out"] * functional.silu(z))
    assert_close(last, call.states)
    slots, kept = torch.tensor([4, 1, 3]), torch.full((5, *call.states.shape[1:]), torch.nan)
    again = torch.empty_like(out)
    assert None is ops.mamba_chunk_scan_combined_varlen(
        call.x, call.dt, call.A, call.B, call.C, 4, call.query_start_loc, unused, unused, unused, again, **given,
        final_states_out=kept, final_state_indices=slots,
    )  # fmt: skip
    wanted: Any = ops.mamba_chunk_scan_combined_varlen(
        call.x, call.dt, call.A, call.B, call.C, 4, call.query_start_loc, unused, unused, unused, again, **given,
        state_dtype=torch.float32,
    )  # fmt: skip
    assert_close(kept[slots], wanted)
    assert kept[[0, 2]].isnan().all()

    rows = {name: getattr(call, name)[:3] for name in ("x", "dt", "B", "C")}
    one = call.with_arrays({**rows, "query_start_loc": torch.arange(4).int()})
    states, wide = one.states.clone(), (1, one.x.shape[2])
    found = ops.selective_state_update(
        states, one.x, one.dt[..., None].expand(-1, -1, wide[1]), one.A[:, None, None].expand(-1, wide[1], 5), one.B,
        one.C, one.D[:, None].expand(-1, wide[1]), one.dt_bias, None, one.dt_softplus,
    )  # fmt: skip
    assert_close(found, run(one)["out"])
    assert_close(states, one.states)


def test_what_has_no_counterpart_is_refused(seed):
    call, arrays = delta(seed)
    with pytest.raises(Unsupported, match="inplace_final_state"):
        ops.fused_recurrent_gated_delta_rule(*arrays, initial_state=call.states, inplace_final_state=False)
    with pytest.raises(InvalidInput, match="initial_state has shape"):
        ops.chunk_gated_delta_rule(*arrays, initial_state=call.states, cu_seqlens=call.query_start_loc)
    twice: Any = [torch.cat([each] * 2) for each in arrays]
    with pytest.raises(InvalidInput, match="q has a batch of 2"):
        ops.chunk_gated_delta_rule(*twice, cu_seqlens=call.query_start_loc)
    x, state, weights = torch.ones(2, 3, 4), torch.zeros(2, 3, 4, 5), torch.ones(2, 1, 5)
    with pytest.raises(Unsupported, match="dt differs within a head"):
        ops.selective_state_update(state, x, torch.rand(2, 3, 4), -torch.ones(3), weights, weights, None, None)
    given: list[Any] = [x, *[torch.ones(2)] * 2, *[weights] * 2, None, torch.tensor([0, 2]), None, None, None, x]
    with pytest.raises(InvalidInput, match="final_state_indices is None; final_states_out and"):
        ops.mamba_chunk_scan_combined_varlen(*given, final_states_out=state)
