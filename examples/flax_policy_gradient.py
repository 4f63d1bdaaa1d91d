"""One Flax module for training and generation: train a small model, sample with the engine, learn from the samples.

The attention is `jattn.nn.MultiHeadAttention`. Training calls it over whole rows, generation over a paged cache. The
training pass computes the same log-probabilities that the engine sampled the tokens with, so the policy gradient needs
no correction.

    python examples/flax_policy_gradient.py

Needs the extra `train` (optax).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jattn import AttentionMetadata, EngineConfig, SamplingParams
from jattn.llm.engine import Engine
from jattn.llm.models import ModelConfig, PagedSpec
from jattn.nn import MultiHeadAttention

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


class Layer(nnx.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = MultiHeadAttention(
            config.num_attention_heads,
            width,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            decode=False,
            rngs=rngs,
        )
        self.up = nnx.Linear(width, config.intermediate_size, rngs=rngs)
        self.down = nnx.Linear(config.intermediate_size, width, rngs=rngs)

    def __call__(self, x, cache=None, metadata=None):
        """Returns the next x, and the layer's cache if one was given."""
        if cache is None:
            attended = self.attention(self.attention_norm(x), is_causal=True)
        else:
            attended, cache = self.attention(self.attention_norm(x), cache=cache, metadata=metadata)
        x = x + attended
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)))), cache


class LanguageModel(nnx.Module):
    """A model of your own: the engine needs `paged_spec`, this call, and `logits`."""

    paged_spec = PagedSpec(
        vocab_size=CONFIG.vocab_size,
        max_model_len=CONFIG.max_position_embeddings,
        num_layers=CONFIG.num_hidden_layers,
        num_kv_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.position = nnx.Embed(config.max_position_embeddings, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.LayerNorm(config.hidden_size, rngs=rngs)

    def __call__(self, token_ids, positions, kv_caches, metadata: AttentionMetadata):
        """Runs the new tokens of a batch of sequences over their caches; returns hidden states and caches."""
        x, new_caches = self.embed(token_ids) + self.position(positions), []
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x, cache = layer(x, cache, metadata)
            new_caches.append(cache)
        return self.norm(x), tuple(new_caches)

    def logits(self, hidden):
        """Returns float32[..., vocab_size]."""
        return self.embed.attend(hidden)

    def log_probs(self, token_ids):
        """Returns float32[rows, tokens, vocab_size] for whole rows, without a cache; training differentiates this."""
        x = self.embed(token_ids) + self.position(jnp.arange(token_ids.shape[1]))
        for layer in self.layers:
            x, _ = layer(x)
        return jax.nn.log_softmax(self.logits(self.norm(x)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(optimizer, graph, params, state, token_ids, weights):
    """Takes one step up the weighted log-likelihood; returns parameters, optimizer state and the mean of it."""

    def loss_of(params):
        found = nnx.merge(graph, params).log_probs(token_ids[:, :-1])
        return -(weights * jnp.take_along_axis(found, token_ids[:, 1:, None], -1)[..., 0]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, -loss


def train(model: LanguageModel, *, steps: int, seed: int = 0) -> list[float]:
    """Teaches the model to count upwards, modulo the vocabulary, from any token; returns the losses."""
    graph, params = nnx.split(model)
    optimizer = optax.adam(1e-2)
    state, losses, rng = optimizer.init(params), [], np.random.default_rng(seed)
    for _ in range(steps):
        token_ids = (rng.integers(CONFIG.vocab_size, size=(16, 1)) + np.arange(12)) % CONFIG.vocab_size
        params, state, mean = update(optimizer, graph, params, state, token_ids, jnp.ones((16, 11)))
        losses.append(-float(mean))
    nnx.update(model, params)
    return losses


def sample(model: LanguageModel, prompts: Sequence[list[int]], *, seed: int = 0) -> np.ndarray:
    """Continues prompts of one length by eight tokens each, all at once; returns int[prompts, tokens]."""
    with Engine(model, EngineConfig(max_num_seqs=8, block_size=4, num_blocks=64)) as engine:
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=seed + index, ignore_eos=True))
            for index, prompt in enumerate(prompts)
        ]
        while engine.num_unfinished:
            engine.step()
    return np.array([[*prompt, *request.output_token_ids] for prompt, request in zip(prompts, requests, strict=True)])


def reinforce(model: LanguageModel, samples: np.ndarray, prompt_len: int, rewards: np.ndarray) -> float:
    """Takes one policy-gradient step (Williams 1992); returns the rise of the objective on these samples."""
    graph, params = nnx.split(model)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    drawn = np.arange(samples.shape[1] - 1) >= prompt_len - 1
    weights = advantages[:, None] * drawn
    optimizer = optax.sgd(0.1)
    params, state, before = update(optimizer, graph, params, optimizer.init(params), samples, weights)
    nnx.update(model, params)
    _, _, after = update(optimizer, graph, params, state, samples, weights)
    return float(after - before)


def main(steps: int = 20) -> tuple[list[float], float]:
    """Trains, samples and takes one step towards the lower half of the vocabulary; returns losses and rise."""
    model = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
    losses = train(model, steps=steps)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    samples = sample(model, [[start, start + 1] for start in range(8)])
    print(f"after [0, 1] comes {samples[0, 2:].tolist()}")
    rewards = (samples[:, 2:] < CONFIG.vocab_size // 2).mean(1)
    rise = reinforce(model, samples, 2, rewards)
    print(f"mean reward {rewards.mean():.2f}; one step raised the objective by {rise:.4f}")
    return losses, rise


if __name__ == "__main__":
    main()
