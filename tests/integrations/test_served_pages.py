"""Models of bonsai and of flax's examples, where they are importable, served as the page on rollout says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "rollout.md"
PARAMS = SamplingParams(temperature=0.9, max_tokens=6, logprobs=0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [9], list(range(20, 31))]


def served(marker: str) -> Any:
    """The function `served` of the page's script that has a marker."""
    (script,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if marker in each]
    assert len(script.splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(script, names)
    return names["served"]


def spread(model: nnx.Module) -> Any:
    """The model with random numbers on its weights, the zeros and ones of the initialisation included."""
    keys = iter(jax.random.split(jax.random.key(0), 200))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: (x + jax.random.normal(next(keys), x.shape) / 10).astype(x.dtype), state))
    return model


def bonsai() -> tuple[Any, Any, Any]:
    modeling = pytest.importorskip("bonsai.models.qwen3.modeling", reason="needs bonsai")
    sizes = {"num_layers": 2, "vocab_size": 48, "emb_dim": 32, "mlp_dim": 64, "num_heads": 4, "head_dim": 8}
    rope = {"rope_theta": 1_000_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4}
    config = modeling.ModelConfig(**sizes, **rope, num_kv_heads=2, norm_eps=1e-6, tie_word_embeddings=False)
    model = spread(modeling.Qwen3(config, rngs=nnx.Rngs(0)))

    def logits(tokens: jax.Array) -> jax.Array:
        cache = modeling.init_cache(config, 1, tokens.shape[1], 0, jnp.float32)
        return model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))

    return model, served("modeling._generate_pos_embeddings"), logits


def gemma() -> tuple[Any, Any, Any]:
    transformer = pytest.importorskip("transformer", reason="needs flax's examples/gemma")
    cfg = pytest.importorskip("transformer_cfg", reason="needs flax's examples/gemma")
    kinds = (cfg.AttentionType.LOCAL_SLIDING, cfg.AttentionType.GLOBAL)
    sizes = {"num_layers": 2, "num_embed": 48, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8}
    options = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "use_qk_norm": True, "sliding_window_size": 4}
    caps = {"attn_logits_soft_cap": 20.0, "final_logit_softcap": 10.0}
    config = cfg.TransformerConfig(
        **sizes, **options, **caps, num_kv_heads=2, attention_types=kinds, dtype=jnp.float32, weight_dtype=jnp.float32
    )
    model = spread(transformer.Transformer(config, rngs=nnx.Rngs(0)))

    def logits(tokens: jax.Array) -> jax.Array:
        evaluated = nnx.clone(model)
        evaluated.eval()
        mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        return evaluated(tokens, jnp.arange(tokens.shape[1])[None], None, mask)[0]

    return model, served("attn.attn_vec_einsum"), logits


@pytest.mark.parametrize("project", [bonsai, gemma])
def test_a_script_of_the_page_gives_the_models_own_log_probabilities_and_follows_it(project: Any) -> None:
    model, serve, logits = project()
    options: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "logprobs_mode": "processed_logprobs"}
    with LLM(wrapped := serve(model, 32), **options) as llm:
        for version in range(2):
            outputs = [each.outputs[0] for each in llm.generate(PROMPTS, PARAMS)]
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                found = [
                    each[token].logprob for each, token in zip(output.logprobs or (), output.token_ids, strict=True)
                ]
                own = logits(jnp.array([[*prompt, *output.token_ids]]))[0].astype(jnp.float32) / 0.9
                rows = np.asarray(jax.nn.log_softmax(own))[len(prompt) - 1 : -1]
                np.testing.assert_allclose(found, rows[range(6), list(output.token_ids)], atol=1e-5)
                assert output.weights_versions == (version,)
            spread(model)
    assert wrapped.model is model
