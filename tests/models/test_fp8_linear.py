"""Linear layers that multiply E4M3 numbers: how exact they are, and which of a model's layers become such."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.bridge import native
from jattn.llm.models import Fp8Linear, quantize_fp8
from jattn.llm.models.quantized import round_to_fp8
from jattn.metadata import AttentionMetadata
from tests.support.pretended_gpu import pretended_gpu
from tests.support.tiny_models import tiny_config, tiny_model
from torch_core.base.errors import InvalidInput
from torch_core.launch.plan import DeviceLimits
from torch_core.rowwise.call import RowQuantizeCall

# A rounded number is off by a sixteenth of itself at most, or by half the smallest one of its row.
HALF_STEP, SMALLEST = 2.0**-4, 2.0**-10 / 448


def fp8_linear(kernel: np.ndarray, bias: np.ndarray | None = None, **options: object) -> Fp8Linear:
    return Fp8Linear(*round_to_fp8(jnp.asarray(kernel)), None if bias is None else jnp.asarray(bias), **options)


def rounding_bound(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The error that rounding both operands may make, for each result."""
    rows = HALF_STEP * np.abs(x) + SMALLEST * np.abs(x).max(-1, keepdims=True)
    columns = HALF_STEP * np.abs(kernel) + SMALLEST * np.abs(kernel).max(0, keepdims=True)
    return rows @ np.abs(kernel) + (np.abs(x) + rows) @ columns


@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 3, 96), (1, 1, 96)])
def test_a_product_is_as_exact_as_its_rounded_operands(shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    x, kernel = random.standard_normal(shape), random.standard_normal((96, 40)) * np.logspace(-3, 3, 40)
    out = np.asarray(fp8_linear(kernel.astype(np.float32))(jnp.asarray(x, jnp.float32)), np.float64)
    assert out.shape == (*shape[:-1], 40)
    assert (np.abs(out - x @ kernel) <= rounding_bound(x, kernel)).all()


def test_numbers_that_e4m3_has_are_multiplied_exactly(seed: int) -> None:
    random = np.random.default_rng(seed)
    x, kernel = (random.integers(-15, 16, shape).astype(np.float32) for shape in ((7, 32), (32, 24)))
    # The largest number of each row and column is 448: a unit is then worth 1.
    x[:, 0], kernel[0] = 448, 448
    found = fp8_linear(kernel)(jnp.asarray(x))
    assert np.array_equal(found, x @ kernel)


def test_each_row_has_a_scale_of_its_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    x, kernel = (random.standard_normal(shape).astype(np.float32) for shape in ((6, 32), (32, 24)))
    factors = np.float32(2.0) ** np.array([[0], [-30], [30], [7], [-8], [1]], np.float32)
    linear = fp8_linear(kernel)
    assert np.array_equal(linear(jnp.asarray(x * factors)), np.asarray(linear(jnp.asarray(x))) * factors)


@pytest.mark.parametrize("largest", [0.0, 1e-44, 1e-38, 1e-36])
def test_rows_of_next_to_nothing_give_the_bias(largest: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    kernel, bias = random.standard_normal((32, 24)).astype(np.float32), random.standard_normal(24).astype(np.float32)
    kernel[:, 3] = 0
    out = fp8_linear(kernel, bias)(jnp.full((3, 32), largest, jnp.float32))
    assert np.array_equal(out, np.broadcast_to(bias, (3, 24)))


def test_what_is_not_finite_shows_in_its_row_alone() -> None:
    x = np.ones((3, 32), np.float32)
    x[1, 4] = np.inf
    out = np.asarray(fp8_linear(np.ones((32, 24), np.float32))(jnp.asarray(x)))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(("preferred", "dtype"), [(None, jnp.bfloat16), (jnp.float32, jnp.float32)])
def test_the_result_has_the_inputs_dtype_or_the_preferred_one(preferred: object, dtype: object) -> None:
    linear = fp8_linear(np.ones((32, 24), np.float32), preferred_element_type=preferred)
    assert linear(jnp.ones((2, 32), jnp.bfloat16)).dtype == dtype


def test_a_models_linear_layers_are_rounded_in_place() -> None:
    model, plain = (tiny_model(tiny_config(), 0) for _ in range(2))
    quantize_fp8(model)
    rounded = {path for path, module in nnx.iter_modules(model) if isinstance(module, Fp8Linear)}
    assert rounded == {
        ("layers", layer, part, name)
        for layer in range(model.config.num_hidden_layers)
        for part, name in (
            ("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj"),
        )
    }  # fmt: skip
    weight, scale = round_to_fp8(plain.layers[0].mlp.down_proj.kernel[...])
    linear: Any = model.layers[0].mlp.down_proj
    assert np.array_equal(linear.weight[...], weight)
    assert np.array_equal(linear.scale[...], scale)


def test_another_module_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^model is a Linear; it must be a decoder of jattn\.llm\.models\.$"):
        quantize_fp8(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_a_model_that_multiplies_e4m3_says_about_the_same(seed: int) -> None:
    config = tiny_config(num_hidden_layers=2)
    model, plain = (tiny_model(config, seed) for _ in range(2))
    quantize_fp8(model)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (1, 24)))
    found, expected = (np.asarray(each.forward_dense(tokens), np.float64) for each in (model, plain))
    # Eight products in turn, each off by an eighth of the root of its terms at the very most.
    assert 0 < np.sqrt(np.mean((found - expected) ** 2)) < 2 * HALF_STEP * np.sqrt(np.mean(expected**2))


def hidden_states(seed: int) -> np.ndarray:
    """What a decoder of one layer gives for a prompt."""
    config = tiny_config(dtype="bfloat16", num_hidden_layers=1)
    model = tiny_model(config, seed, None)
    quantize_fp8(model)
    graph, state = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, 9))
    cache = jnp.zeros((2, 2, 16, config.num_key_value_heads, config.head_dim), jnp.bfloat16)
    metadata = AttentionMetadata(
        block_tables=jnp.ones((1, 1), jnp.int32), seq_lens=jnp.array([9], jnp.int32),
        query_start_loc=jnp.array([0, 9], jnp.int32), slot_mapping=jnp.arange(16, 25, dtype=jnp.int32), max_query_len=9,
    )  # fmt: skip
    run = jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands)[0])
    return np.asarray(run(state, tokens, jnp.arange(9), (cache,), metadata).astype(jnp.float32))


def test_rows_may_stay_e4m3_from_kernel_to_kernel(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    apart = hidden_states(seed)
    monkeypatch.setattr(native, "device_limits", DeviceLimits)
    with pretended_gpu() as launched:
        joined = hidden_states(seed)
    # Two norms, attention's results and the activation.
    assert sum(isinstance(call, RowQuantizeCall) for call in launched) == 4
    # Other roundings to bfloat16 move numbers over the borders of e4m3, in three products in turn.
    assert 0 < np.sqrt(np.mean((joined - apart) ** 2)) < 3 * HALF_STEP * np.sqrt(np.mean(apart**2))


OTHERS = [
    {"dtype": "float32"},
    {"norm_type": "layer_norm"},
    {"parallel_block": "two_norms"},
    {"attn_head_gate": True, "attn_gate_act": "softplus"},
]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_other_layers_take_rows_of_numbers(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "device_limits", DeviceLimits)
    model = tiny_model(tiny_config(**{"dtype": "bfloat16", "num_hidden_layers": 1, **changes}), 0, None)
    quantize_fp8(model)
    with pretended_gpu():
        assert model.layers[0].input_norm(quantizes=True) is model.layers[0].input_layernorm
