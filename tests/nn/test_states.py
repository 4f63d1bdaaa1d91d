"""Layers with a recurrent state equal those of transformers, whole and in chunks from and to their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jattn import AttentionMetadata
from jattn.nn import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2, PagedAttention, ShortConv
from torch_core.base.errors import InvalidInput
from torch_core.metadata import SequenceRow

BATCH, LENGTH, FEATURES, SLOTS = 2, 11, 16, 6
TOLERANCE = 2e-5


def joined(qkvz: np.ndarray, ba: np.ndarray) -> np.ndarray:
    """Returns the rows of two tensors of Qwen3-Next, by groups of heads, as our layer has them, then zeros."""
    parts = [*np.split(qkvz.reshape(2, 40, -1), [8, 16, 28], axis=1), *np.split(ba.reshape(2, 4, -1), 2, axis=1)]
    rows = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    return np.pad(rows, ((0, 96 - len(rows)), (0, 0)))


def first_matrix(theirs: Any, of: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Returns what `of` says of the matrices that are one in our layer, joined as they are there."""
    if hasattr(theirs, "in_proj"):
        return of(theirs.in_proj)
    if hasattr(theirs, "in_proj_qkvz"):
        return joined(of(theirs.in_proj_qkvz), of(theirs.in_proj_ba))
    names = ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
    return np.concatenate([of(theirs.get_submodule(name)) for name in names])


def make(kind: str) -> tuple[Any, Any]:
    """Returns a layer of transformers and ours with its weights."""
    torch.manual_seed(0)
    if kind == "lfm2":
        from transformers import Lfm2Config
        from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

        theirs: Any = Lfm2ShortConv(
            Lfm2Config(hidden_size=FEATURES, conv_L_cache=3, conv_bias=True, layer_types=["conv"], num_hidden_layers=1),
            0,
        )
        ours: Any = ShortConv(FEATURES, use_bias=True, rngs=nnx.Rngs(0))
    elif kind == "bamba":
        from transformers import BambaConfig
        from transformers.models.bamba.modeling_bamba import BambaMixer

        sizes: Any = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 2, "mamba_d_state": 6}
        config = BambaConfig(hidden_size=FEATURES, num_hidden_layers=1, num_attention_heads=2, **sizes)
        theirs = BambaMixer(config, 0)
        ours = Mamba2(4, FEATURES, head_dim=8, state_size=6, num_groups=2, rngs=nnx.Rngs(0))
    elif kind == "kimi_linear":
        from transformers import KimiLinearConfig
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

        sizes = {"linear_num_heads": 2, "linear_head_dim": 8, "layer_types": ["linear_attention"]}
        theirs = KimiLinearDeltaAttention(KimiLinearConfig(hidden_size=FEATURES, num_hidden_layers=1, **sizes), 0)
        for parameter in theirs.forget_gate.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        ours = KimiDeltaAttention(2, FEATURES, head_dim=8, rngs=nnx.Rngs(0))
    else:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        config = Qwen3NextConfig(
            hidden_size=FEATURES,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
        )
        theirs = Qwen3NextGatedDeltaNet(config, 0)
        ours = GatedDeltaNet(4, FEATURES, num_kv_heads=2, key_dim=8, value_dim=6, rngs=nnx.Rngs(0))
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.named_parameters()}
    tensors["in_proj.weight"] = first_matrix(theirs, lambda linear: linear.weight.detach().numpy())
    for name, tensor in tensors.items():
        name = name.removeprefix("forget_gate.").replace("o_norm", "norm").replace("o_proj", "out_proj")
        owner, _, leaf = name.rpartition(".")
        if owner and not hasattr(ours, owner):
            continue  # A part of the first matrix.
        module = getattr(ours, owner) if owner else ours
        if isinstance(module, nnx.Linear) and leaf == "weight":
            leaf, tensor = "kernel", tensor.T
        elif isinstance(module, nnx.RMSNorm):
            leaf = "scale"
        param = getattr(module, leaf)
        param[...] = jnp.asarray(tensor.reshape(param.shape))
    return theirs, ours


@pytest.fixture(params=["lfm2", "qwen3_next", "kimi_linear", "bamba"])
def layers(request):
    return make(request.param)


def inputs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BATCH, LENGTH, FEATURES)).astype(np.float32)


def test_a_layer_and_its_gradients_equal_those_of_transformers(layers, seed):
    theirs, ours = layers
    x: Any = torch.from_numpy(inputs(seed)).requires_grad_()
    wanted = theirs(x)
    wanted.square().sum().backward()
    graph, weights = nnx.split(ours)

    @jax.jit
    def gradients(weights, x):
        out, pullback = jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x), weights, x)
        return out, *pullback(2 * out)

    out, of_weights, of_x = gradients(weights, jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(out, wanted.detach().numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    first = first_matrix(theirs, lambda linear: linear.weight.grad.numpy())
    pairs = [(of_x, x.grad.numpy()), (of_weights["in_proj"]["kernel"][...], first.T)]
    gates = getattr(theirs, "forget_gate", theirs)
    if hasattr(gates, "A_log"):
        pairs += [(of_weights[each][...], getattr(gates, each).grad.numpy().ravel()) for each in ("A_log", "dt_bias")]
    for found, gradient in pairs:
        np.testing.assert_allclose(found, gradient, atol=TOLERANCE * max(1, np.abs(gradient).max()), rtol=TOLERANCE)


def test_chunks_and_decoded_tokens_from_slots_equal_whole_sequences(layers, seed):
    _, ours = layers
    x = jnp.asarray(inputs(seed))
    call = nnx.jit(lambda layer, x, **options: layer(x, **options))
    whole = call(ours, x)
    spec = ours.state_spec()
    states: Any = tuple(jnp.full(shape, jnp.nan) for shape in spec.array_shapes(SLOTS))
    slots, done, found = (4, 2), [0, 0], [[], []]
    for counts in ((5, 3), (1, 7), (4, 1), (1, None)):
        live = [(seq, count) for seq, count in enumerate(counts) if count]
        rows = [SequenceRow([1 + 2 * seq, 2 + 2 * seq], done[seq], count, None, slots[seq]) for seq, count in live]
        metadata = AttentionMetadata.build(
            rows, block_size=8, num_blocks=8, num_seqs=3, num_tokens=12, max_query_len=8, num_slots=SLOTS
        )
        packed = jnp.concatenate([x[seq, done[seq] : done[seq] + count] for seq, count in live])
        packed = jnp.concatenate([packed, jnp.ones((12 - len(packed), FEATURES))])
        given = states if len(states) > 1 else states[0]
        out, states = call(ours, packed, states=given, metadata=metadata)
        states = states if isinstance(states, tuple) else (states,)
        start = 0
        for seq, count in live:
            found[seq].append(out[start : start + count])
            done[seq], start = done[seq] + count, start + count
    assert done == [LENGTH, LENGTH]
    for seq in range(BATCH):
        np.testing.assert_allclose(jnp.concatenate(found[seq]), whole[seq], atol=TOLERANCE, rtol=TOLERANCE)
    for array in states:
        assert np.isnan(np.delete(np.asarray(array), slots, 0)).all()


def test_calls_that_do_not_fit_are_refused(layers):
    _, ours = layers
    with pytest.raises(InvalidInput, match="one of states and metadata is None"):
        ours(jnp.ones((3, FEATURES)), states=())
    with pytest.raises(InvalidInput, match="inputs has shape"):
        ours(jnp.ones((2, 3, FEATURES + 1)))
    with pytest.raises(InvalidInput, match="num_heads"):
        GatedDeltaNet(3, 8, num_kv_heads=2, key_dim=4, value_dim=4, rngs=nnx.Rngs(0))


def test_states_and_tokens_of_another_number_are_refused(layers):
    _, ours = layers
    states: Any = tuple(jnp.zeros(shape) for shape in ours.state_spec().array_shapes(SLOTS))
    step = AttentionMetadata.build([SequenceRow([1], 0, 3, None, 1)], block_size=8, num_blocks=2, num_slots=SLOTS)
    given: Any = states if len(states) > 1 else states[0]
    with pytest.raises(InvalidInput, match=f"^states has {3 - len(states)} arrays; the layer has {len(states)}"):
        ours(jnp.ones((3, FEATURES)), states=states[0] if len(states) > 1 else (given, given), metadata=step)
    with pytest.raises(InvalidInput, match=r"^inputs has 2 tokens; metadata is for a step of 3\."):
        jax.eval_shape(lambda x: ours(x, states=given, metadata=step), jnp.ones((2, FEATURES)))


@pytest.mark.parametrize("shape", [(2, 0, 12), (0, 3, 12)])
def test_inputs_without_a_token_are_refused(shape):
    for layer in (
        LightningAttention(2, 12, head_dim=8, rngs=nnx.Rngs(0)),
        KimiDeltaAttention(2, 12, head_dim=8, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(InvalidInput, match=r"^inputs has shape .*; no size may be 0\.$"):
            layer(jnp.ones(shape))
    step = AttentionMetadata.build([], block_size=8, num_blocks=2, num_slots=SLOTS)
    with pytest.raises(InvalidInput, match=r"^inputs has shape \(0, 12\); no size may be 0\.$"):
        ShortConv(12, rngs=nnx.Rngs(0))(jnp.ones((0, 12)), states=jnp.zeros((SLOTS, 2, 12)), metadata=step)


def test_a_term_of_a_norm_is_not_negative():
    with pytest.raises(InvalidInput, match=r"^epsilon is -1\.0; it must be at least 0\.$"):
        KimiDeltaAttention(2, 12, head_dim=8, epsilon=-1.0, rngs=nnx.Rngs(0))


def test_a_cache_of_the_other_kind_is_refused(layers):
    _, ours = layers
    step = AttentionMetadata.build([SequenceRow([1], 0, 3, None, 1)], block_size=8, num_blocks=2, num_slots=SLOTS)
    blocks = jnp.zeros((2, 2, 8, 2, 8))
    given: Any = (blocks,) * len(ours.state_spec().shapes)
    with pytest.raises(InvalidInput, match=r"^\w*states has shape .2, 2, 8, 2, 8.; it must have [34] axes"):
        ours(jnp.ones((3, FEATURES)), states=given if len(given) > 1 else blocks, metadata=step)
    rows = jnp.ones((3, 2, 8))
    for shape in (*ours.state_spec().array_shapes(SLOTS), (SLOTS, 8, 8, 8)):
        with pytest.raises(InvalidInput, match="kv_cache"):
            PagedAttention(2, 8)(rows, rows, rows, jnp.zeros(shape), step)
