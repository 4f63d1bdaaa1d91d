"""The layers round as Hugging Face's do."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jattn.llm.models import Decoder, layers
from jattn.llm.models.layers import LayerNorm, RMSNorm, dot_general, linear
from jattn.llm.models.recurrent import mamba_dot_general
from jattn.ops.activations import gated
from tests.support.devices import mesh, on_eight_devices, place
from tests.support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("norm_type", "module", "name", "unlike"),
    [
        ("rms_norm", "llama", "LlamaRMSNorm", 0),
        # One rounding of a float32 product, whose last bit may be another: now and then it lies on a boundary.
        ("rms_norm_wide", "olmo2", "Olmo2RMSNorm", 0.001),
        ("gemma_rms_norm", "gemma2", "Gemma2RMSNorm", 0.001),
    ],
)
def test_a_bfloat16_norm_has_the_bits_of_transformers(norm_type, module, name, unlike, seed):
    torch = pytest.importorskip("torch")
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}.modeling_{module}"), name)(96, 1e-5)
    random = np.random.default_rng(seed)
    x, weight = random.normal(size=(64, 96)), random.normal(1, 0.2, 96)
    theirs = theirs.to(torch.bfloat16)
    theirs.weight.data = torch.from_numpy(weight).to(torch.bfloat16)
    ours = RMSNorm(96, epsilon=1e-5, dtype="bfloat16", norm_type=norm_type)
    ours.weight[...] = jnp.asarray(weight, jnp.bfloat16)

    found = np.asarray(ours(jnp.asarray(x, jnp.bfloat16)), np.float32)

    expected = theirs(torch.from_numpy(x).to(torch.bfloat16)).float().detach().numpy()
    assert (found != expected).mean() <= unlike
    np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "launches", "calls"),
    [
        ((512, 8), "float32", True, 1),
        ((511, 8), "float32", True, 0),
        ((1, 512, 8), "float32", True, 0),
        ((512, 8), "float32", False, 0),
        # The kernel has one dtype for rows and weights; embeddings of a caller may have another.
        ((512, 8), "bfloat16", True, 0),
    ],
)
def test_the_rows_of_a_large_step_are_normalised_by_a_kernel(shape, dtype, launches, calls, monkeypatch):
    found = []
    monkeypatch.setattr(layers, "launches_kernels", lambda implementation: launches)
    monkeypatch.setattr(layers, "row_norm", lambda x, *rest, **options: (found.append(x.shape), x)[1])

    RMSNorm(8, epsilon=1e-5, dtype="float32")(jnp.ones(shape, dtype))

    assert found == [shape] * calls


@pytest.mark.parametrize("implementation", [None, "xla", "torch"])
def test_a_decoders_norms_are_kernels_where_its_implementation_is(implementation, monkeypatch):
    asked = []
    monkeypatch.setattr(layers, "launches_kernels", lambda implementation: (asked.append(implementation), False)[1])
    decoder = Decoder(tiny_config(qk_norm="all"), rngs=nnx.Rngs(0), implementation=implementation)

    for _, module in nnx.iter_modules(decoder):
        if isinstance(module, RMSNorm):
            module(jnp.ones((512, *module.weight.shape), module.weight.dtype))

    assert set(asked) == {implementation}


@pytest.mark.parametrize(
    ("shape", "changes", "launches"),
    [
        ((64, 48), {}, True),
        ((63, 48), {}, False),
        ((1, 64, 48), {}, False),
        ((512, 48), {"mlp_bias": True}, False),
        ((512, 48), {"hidden_act": "gelu"}, False),
        ((512, 48), {"gated_mlp": False}, False),
        ((512, 48), {"mlp_multipliers": (2.0, 3.0)}, False),
        ((512, 48), {"mlp_multipliers": (1.0, 3.0)}, True),
    ],
    ids=str,
)
def test_many_rows_are_multiplied_and_gated_in_one_launch(shape, changes, launches, monkeypatch, seed):
    asked = []
    mlp = Decoder(tiny_config(**changes), rngs=nnx.Rngs(seed), implementation="xla").layers[0].mlp
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
    expected = mlp(x)
    monkeypatch.setattr(layers, "gates_rows", lambda x, kernel, implementation: (asked.append(implementation), True)[1])

    np.testing.assert_allclose(mlp(x), expected, rtol=1e-5, atol=1e-6)

    assert asked == ["xla"] * launches


def doubled(x, kernel, *rest, **options):
    return 2 * jax.lax.dot_general(x, kernel, *rest, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nnx.LoRALinear, {"lora_rank": 2, "b_initializer": nnx.initializers.normal()}),
        (nnx.Linear, {"dot_general": doubled}),
    ],
    ids=["LoRALinear", "dot_general"],
)
def test_many_rows_go_through_a_linear_layer_of_ones_own(kind, options, monkeypatch, seed):
    mlp = Decoder(tiny_config(), rngs=nnx.Rngs(seed), implementation="xla").layers[0].mlp
    mlp.gate_up_proj = kind(*mlp.gate_up_proj.kernel.shape, use_bias=False, rngs=nnx.Rngs(seed), **options)
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((512, 48)), jnp.float32)
    expected = mlp(x)
    monkeypatch.setattr(layers, "gates_rows", lambda *given: True)

    np.testing.assert_array_equal(mlp(x), expected)


def test_a_layer_norm_keeps_its_digits_where_the_mean_is_large(seed):
    x = 1000 + np.random.default_rng(seed).normal(size=(8, 96)).astype(np.float32)
    found = LayerNorm(96, epsilon=1e-5, dtype="float32", use_bias=False)(jnp.asarray(x))
    wide = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    expected = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5)
    # A sum of 96 numbers near 1000 is rounded by up to 48 units of 2 ** -7, a mean by 2 ** -14 at most.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-12)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"])
def test_activations_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations").ACT2FN
    x = np.linspace(-6, 6, 101)
    expected = activations[name](torch.from_numpy(x)).numpy()
    found = gated(name, jnp.concatenate([jnp.asarray(x, jnp.float32), jnp.ones(101)]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=6 * 2.0**-21)


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_a_product_of_many_inputs_rounds_half_as_much_as_a_sum_of_one_after_the_other(rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    layer = linear(1536, 64, use_bias=False, rngs=nnx.Rngs(seed))
    x, kernel = random.normal(size=(rows, 1536)).astype(np.float32), np.asarray(layer.kernel[...])
    x[:, 5] *= 1000
    exact = x.astype(np.float64) @ kernel

    found = jax.jit(layer)(jnp.asarray(x))

    one_by_one = np.add.accumulate(x[:, :, None] * kernel, axis=1, dtype=np.float32)[:, -1]
    assert np.square(found - exact).mean() <= 0.5**2 * np.square(one_by_one - exact).mean()


def test_a_product_of_inputs_with_a_prime_number_is_not_cut(seed: int) -> None:
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 521)), jnp.float32)
    layer = linear(521, 8, use_bias=True, rngs=nnx.Rngs(seed))

    found = layer(x)

    assert jax.make_jaxpr(layer)(x).pretty_print(use_color=False).count("dot_general[") == 1
    assert layer.bias is not None
    np.testing.assert_array_equal(found, x @ layer.kernel[...] + layer.bias[...])


MANY = 1 << 13


@pytest.mark.parametrize(
    ("platform", "rows", "in_features", "dtype"),
    [
        ("cuda", "2", 64, None),
        ("cpu", "1", 64, None),
        # With the row it has 10,000,000 elements, or fewer.
        ("cuda", "1", 4881, None),
        ("cuda", "4x2", 4880, None),
        # A sum of four from 2 ** 22 weights on, of inputs that are a multiple of four.
        ("cuda", "4x2", 2048, None),
        ("cuda", "2", 2044, None),
        ("cuda", "2", 2050, None),
        ("cuda", "2", MANY, jnp.bfloat16),
    ],
)
def test_one_row_is_multiplied_as_two_where_xla_would_write_the_product_or_wide_weights(
    platform: str, rows: str, in_features: int, dtype: Any
) -> None:
    options: dict[str, Any] = {} if dtype is None else {"param_dtype": dtype, "preferred_element_type": jnp.float32}
    layer = nnx.eval_shape(lambda: linear(in_features, 2048, use_bias=False, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(layer)
    row = jax.ShapeDtypeStruct((1, in_features), dtype or jnp.float32)
    traced = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).trace(state, row)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert re.findall(r"dot_general .*: \(tensor<([\dx]+)x\d+x[bf]", text) == [rows]


@pytest.mark.parametrize(("shape", "rows"), [((3072, 8832), "4x2"), ((12288, 3072), "1"), ((3072, 3072), "4x2")])
def test_the_products_of_mamba_are_in_parts_with_more_weights(shape: tuple[int, int], rows: str) -> None:
    x, kernel = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((1, shape[0]), shape))
    product = functools.partial(mamba_dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    text = jax.jit(product).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"dot_general .*: \(tensor<([\dx]+)x\d+x[bf]", text) == [rows]


@on_eight_devices
def test_one_row_that_lies_on_more_devices_than_a_product_has_parts_is_multiplied_whole() -> None:
    devices = mesh("explicit", tp=8)
    x, kernel = jnp.ones((1, 2048), jnp.bfloat16), jnp.ones((2048, 2048), jnp.bfloat16)
    placed = place(x, devices, PartitionSpec(None, "tp")), place(kernel, devices, PartitionSpec("tp", None))
    product = functools.partial(dot_general, dimension_numbers=(((1,), (0,)), ((), ())), out_sharding=PartitionSpec())
    with jax.set_mesh(devices):
        np.testing.assert_array_equal(jax.jit(product)(*placed), jnp.full((1, 2048), 2048))
