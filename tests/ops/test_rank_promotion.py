"""Programs that mix ranks nowhere, and ops that mix dtypes nowhere: each is traced where JAX refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jattn.llm.models import Decoder, LatentConfig, MoEConfig
from jattn.metadata import AttentionMetadata
from jattn.nn import MultiHeadAttention, attention_fn
from jattn.nn import linen as twin
from jattn.ops import attention_with_lse, paged_attention_with_lse
from jattn.ops.xla import jax_op
from tests.ops.runner import arrays, keywords
from tests.support.attention_cases import random_dense_case, random_paged_case
from tests.support.tiny_models import tiny_config
from torch_core.launch.op import loaded
from torch_core.metadata import SequenceRow
from torch_core.serves import ROOMS

CALLS = {label: call for room in ROOMS for label, call in loaded(f"{room.__name__}.op:calls_in_use")().items()}
#: The one with most arrays of each kind of call.
LABELS = {type(call): label for label, call in sorted(CALLS.items(), key=lambda entry: len(entry[1].arrays()))}


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("label", LABELS.values())
def test_an_op_in_jnp(label: str, x64: bool) -> None:
    call = CALLS[label].map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)))

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax_op(call).jnp, call)


@pytest.mark.parametrize("implementation", ["torch", "xla"])
@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.parametrize("draw", [random_paged_case, random_dense_case])
def test_features_of_attention(draw: Any, seed: int, implementation: str) -> None:
    case = draw(seed)
    attend = paged_attention_with_lse if case.paged else attention_with_lse
    static = {**keywords(case.spec), **{name: max(1, size) for name, size in case.limits.items()}}

    given = {**arrays(case), **case.options}
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda x: attend(**x, **static, implementation=implementation), given)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("lengths", [None, (3, 7)])
def test_a_module_with_every_option_and_its_derivative(lengths: tuple[int, ...] | None, x64: bool) -> None:
    options: dict[str, Any] = {"normalize_qk": True, "sliding_window": 4, "alibi_slopes": (0.5, 0.2), "sinks": True}
    module = MultiHeadAttention(2, 16, num_kv_heads=1, decode=False, **options, rngs=nnx.Rngs(0))
    module.init_cache((2, 12, 16))
    lens = None if lengths is None else jnp.array(lengths, jnp.int32)
    graph, state = nnx.split(module)

    def decode(state: Any, x: jax.Array) -> Any:
        module = nnx.merge(graph, state)
        return module(x, decode=True, lengths=lens), nnx.state(module)

    def loss(x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, is_causal=True, lengths=lens).sum()

    x = jnp.ones((2, 7, 16))
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(decode, state, x)
        jax.eval_shape(jax.grad(loss), x)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("implementation", ["torch", "xla"])
def test_segments_and_their_derivative(implementation: str, own: bool, x64: bool) -> None:
    q, k, ids = jnp.ones((2, 7, 2, 8)), jnp.ones((2, 7, 1, 8)), jnp.ones((2, 7), jnp.int32)
    options: dict[str, Any] = {"segment_ids": ids, "key_segment_ids": None if own else ids, "is_causal": True}
    if implementation == "xla":
        options |= {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(lambda q: attention_fn(q, k, k, **options, implementation=implementation).sum()), q)


def test_the_linen_module_with_a_cache() -> None:
    layer = twin.MultiHeadAttention(2, decode=True, max_length=12)

    def initialised_and_called(x: jax.Array) -> Any:
        return layer.apply(layer.init(jax.random.key(0), x[:, :1]), x, mutable=["cache"])

    jax.eval_shape(initialised_and_called, jnp.ones((2, 7, 16)))


_LATENT = LatentConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=20)
_EXPERTS = MoEConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=24, router_bias=True, expert_bias=True)
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "layer norms and learned positions": {"norm_type": "layer_norm", "position_embedding": "learned"},
    "ALiBi and experts": {"position_embedding": "alibi", "moe": _EXPERTS, "norm_type": "gemma_rms_norm"},
    "latents": {"latent": _LATENT, "num_key_value_heads": 4, "head_dim": 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder(name: str) -> None:
    config = tiny_config(num_hidden_layers=1, **MODELS[name])
    row = SequenceRow([1], 0, 9)
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 3, "num_tokens": 16, "max_blocks": 2, "max_query_len": 16}
    metadata = AttentionMetadata.build([row], **sizes)

    def run() -> Any:
        model = Decoder(config, rngs=nnx.Rngs(0), implementation="xla")
        spec = model.paged_spec
        caches = (jnp.zeros(spec.cache_spec(16).shape(3), spec.dtype),)
        hidden, _ = model(jnp.ones(16, jnp.int32), jnp.arange(16), caches, metadata)
        return model.logits(hidden), model.forward_dense(jnp.ones((2, 9), jnp.int32))

    jax.eval_shape(run)
