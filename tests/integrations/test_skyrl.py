"""SkyRL-tx's models, where SkyRL is importable: the engine gives the tokens of the model's own generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import InvalidInput

pytest.importorskip("skyrl.tx.models.qwen3", reason="needs SkyRL-tx")
IDS = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [9, 0, 0, 0, 0]], np.int32)
MASK = (IDS > 0).astype(np.int32)


def a_model(family: str, num_adapters: int = 0) -> Any:
    from skyrl.tx.models import configs, llama3, qwen3  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, Qwen3Config

    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": False}
    theirs, model = {
        "qwen3": (Qwen3Config, qwen3.Qwen3ForCausalLM),
        "llama3": (LlamaConfig, llama3.Llama3ForCausalLM),
    }[family]
    lora = {"max_lora_adapters": num_adapters, "max_lora_rank": 4, "shard_attention_heads": True}
    return model(configs.ModelConfig(theirs(**sizes), **lora), dtype=jnp.float32, rngs=nnx.Rngs(0))


def randomise_adapters(model: Any, seed: int) -> None:
    keys = iter(jax.random.split(jax.random.key(seed), 100))

    def changed(path: Any, x: jax.Array) -> jax.Array:
        is_lora = any("lora_A" in str(key) or "lora_B" in str(key) for key in path)
        return jax.random.normal(next(keys), x.shape) / 4 if is_lora else x

    nnx.update(model, jax.tree_util.tree_map_with_path(changed, nnx.state(model)))


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
@pytest.mark.parametrize("adapters", [None, [0, 2, 1]], ids=["base", "adapters"])
def test_the_generator_gives_the_tokens_and_log_probabilities_of_the_model(family: str, adapters: Any) -> None:
    from jattn.integrations.skyrl import Generator

    asked = {"temperature": 0.0, "max_tokens": 6, "seed": 1, "stop_tokens": None, "stop_strings": None}
    params = [SimpleNamespace(**asked, top_k=-1, top_p=1.0)] * 3
    mesh = jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        model = a_model(family, 0 if adapters is None else 3)
        generator = Generator(model, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32)
        # The engine follows them.
        randomise_adapters(model, 0)
        options: dict[str, Any] = {"sampling_params": params, "prompt_logprobs": True}
        indices = None if adapters is None else jnp.array(adapters)
        wanted = model.generate(jnp.array(IDS), jnp.array(MASK), adapter_indices=indices, **options)
        found = generator.generate(IDS, MASK, adapter_indices=adapters, **options)
        with pytest.raises(InvalidInput, match="adapter"):
            generator.generate(IDS, MASK, adapter_indices=np.array([0, 1, 9]), **options)
    assert (found.generated_ids, found.stop_reasons) == (wanted.generated_ids, wanted.stop_reasons)
    for one, other in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        for row, expected in zip(one, other, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False], ids=["whole", "decoded"])
def test_the_attention_function_gives_theirs_with_gradients(is_causal: bool, seed: int) -> None:
    from skyrl.tx.layers import attention  # pyright: ignore[reportMissingImports]

    from jattn.integrations.skyrl import dot_product_attention

    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(key, (3, 5, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    q = q if is_causal else q[:, :1]
    real = jnp.array(MASK)[:, : q.shape[1], None, None] > 0

    def with_gradients(attend: Any) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.where(real, attend(*arrays, jnp.array(MASK), is_causal, 8), 0).var()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    found, wanted = with_gradients(dot_product_attention), with_gradients(attention.dot_product_attention)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), found, wanted)
