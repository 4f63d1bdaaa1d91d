"""GRPO of a plain nnx model: the engine samples from the very arrays that the optimizer changes in place.

The model has layers of its own with a batch axis; `jattn.llm.models.Served` gives their attention a paged cache. The
log-probabilities of the engine, at temperature 0.9, have the bits of the training pass: no correction is needed.

    python examples/grpo.py

Needs the extra `train` (optax).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jattn import LLM, SamplingParams, attention_fn, token_logprobs
from jattn.llm.models import PagedSpec, Served

TEMPERATURE, GROUP, NEW_TOKENS = 0.9, 4, 6
SPEC = PagedSpec(vocab_size=16, max_model_len=32, num_layers=2, num_kv_heads=2, head_dim=8)


class Attention(nnx.Module):
    """Causal attention without a cache in training, and by the engine's cache in generation."""

    batch_invariant = False

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv, self.output = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x, cache=None):
        """Returns the attended x, [batch, length, 32]."""
        heads = self.qkv(x).reshape(*x.shape[:2], 8, 8)
        q, k, v = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
        attended = cache.attend(q, k, v) if cache is not None else self.attend(q, k, v)
        return self.output(attended.reshape(x.shape))

    def attend(self, q, k, v):
        """Attends in training, in the arithmetic that the engine switched to."""
        return attention_fn(q, k, v, is_causal=True, batch_invariant=self.batch_invariant)


class LanguageModel(nnx.Module):
    """A model with a call of its own; its sums are those of linear layers and attention."""

    batch_invariant = False

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.position = nnx.Embed(16, 32, rngs=rngs), nnx.Embed(32, 32, rngs=rngs)
        self.layers, self.head = nnx.List([Attention(rngs) for _ in range(2)]), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens, positions, cache=(None, None)):
        """Returns logits [batch, length, 16]."""
        x = self.embed(tokens) + self.position(positions)
        for layer, each in zip(self.layers, cache, strict=True):
            x = x + layer(x, each)
        return self.head(x)


@nnx.jit
def log_probs(model, tokens):
    """Returns the log-probabilities of the new tokens at the temperature, [rows, NEW_TOKENS]."""
    logits = model(tokens[:, :-1], jnp.arange(tokens.shape[1] - 1)[None])
    found = token_logprobs(logits, tokens[:, 1:], temperature=TEMPERATURE, batch_invariant=True)
    return found[:, -NEW_TOKENS:]


@nnx.jit
def update(model, optimizer, tokens, old, advantages):
    """Changes the model in place by one step of the clipped objective."""

    def loss(model):
        ratio = jnp.exp(log_probs(model, tokens) - old)
        return -jnp.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def main(steps: int = 2) -> tuple[list[float], list[int]]:
    """Trains towards even tokens; returns the largest differences of log-probabilities, and the compilations so far."""
    model = LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    prompts = [[start, start + 1] for start in range(2) for _ in range(GROUP)]
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    served = Served(model, SPEC, lambda model, *call: model(*call), num_heads=4)
    gaps, compilations = [], []
    with LLM(served, logprobs_mode="processed_logprobs", batch_invariant=True) as llm:
        for step in range(steps + 1):
            outputs = [each.outputs[0] for each in llm.generate(prompts, params)]
            tokens = jnp.array([[*prompt, *each.token_ids] for prompt, each in zip(prompts, outputs, strict=True)])
            pairs = (zip(each.logprobs or (), each.token_ids, strict=True) for each in outputs)
            old = jnp.array([[found[token].logprob for found, token in each] for each in pairs])
            gaps.append(float(jnp.abs(log_probs(model, tokens) - old).max()))
            compilations.append(llm.engine.num_compilations)
            rewards = np.array(tokens[:, 2:] % 2 == 0, np.float32).mean(1).reshape(-1, GROUP)
            print(f"{step} updates: reward {rewards.mean():.2f}, log-probabilities differ by {gaps[-1]:.1e}")
            spread = rewards - rewards.mean(1, keepdims=True)
            advantages = spread / (rewards.std(1, keepdims=True) + 1e-6)
            update(model, optimizer, tokens, old, jnp.array(advantages.reshape(-1, 1)))
    return gaps, compilations


if __name__ == "__main__":
    main()
