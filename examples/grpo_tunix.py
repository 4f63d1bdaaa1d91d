"""GRPO by tunix with this project's engine as its rollout: one argument, `rollout_engine=`.

A tiny Qwen 3 learns from two batches, with LoRA or without. Before and after, the log-probabilities of the rollout are
compared with those of the actor.

    python examples/grpo_tunix.py

Needs google-tunix.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
from tunix.rl import common, rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from jattn.integrations.tunix import Rollout

PAD, EOS, TEMPERATURE = 0, 1, 0.9
PROMPTS = np.array(["ab", "bcd"])


class Letters:
    """A tokenizer with an id for each letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Returns the ids of letters."""
        return [ord(letter) - ord("a") + 2 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        """Returns the letters of ids."""
        return "".join(chr(each - 2 + ord("a")) for each in ids if each > EOS)

    bos_id, eos_id, pad_id = (staticmethod(lambda found=found: found) for found in (0, EOS, PAD))


def cluster(*, lora: bool) -> rl_cluster.RLCluster:
    """Returns actor, reference and rollout of a tiny model on one device."""
    sizes = {"num_layers": 2, "vocab_size": 28, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    config = qwen3.ModelConfig(**sizes, **heads, rope_theta=1_000_000, norm_eps=1e-6)
    reference = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    nnx.update(reference, jax.tree.map(lambda x: x + jax.random.normal(next(keys), x.shape) / 8, nnx.state(reference)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    actor = nnx.clone(reference)
    if lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|o_proj|up_proj|down_proj|lm_head)", rank=4, alpha=8.0)
        actor = qwix.apply_lora_to_model(reference, provider, **reference.get_model_input())
    lengths = {"max_tokens_to_generate": 8, "max_prompt_length": 8, "kv_cache_size": 64}
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    training = {"mini_batch_size": 2, "train_micro_batch_size": 2, "max_steps": 2, "eval_every_n_steps": 100}
    options = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=functools.partial(Rollout, max_num_seqs=4, max_num_batched_tokens=32),
        rollout_config=base_rollout.RolloutConfig(**lengths, temperature=TEMPERATURE, return_logprobs=True),
        training_config=rl_cluster.RLTrainingConfig(actor_optimizer=optax.sgd(0.1), **training),
    )
    return rl_cluster.RLCluster(actor=actor, reference=reference, tokenizer=Letters(), cluster_config=options)


def difference(found: rl_cluster.RLCluster) -> float:
    """Returns the largest difference between the log-probabilities of the rollout and the actor."""
    output = found.generate(PROMPTS.tolist() * 2)
    rows = [np.pad(each, (0, 8 - len(each)), constant_values=PAD) for each in output.tokens]
    tokens = {"prompt_tokens": jnp.array(output.left_padded_prompt_tokens), "completion_tokens": jnp.array(rows)}
    parts = nnx.split(found.actor_trainer.model)
    actors = common.compute_per_token_logps(*parts, **tokens, pad_id=PAD, eos_id=EOS, temperature=TEMPERATURE)
    # tunix masks padding tokens, which an untrained model samples, too.
    known = [(a[: len(t)], b) for a, b, t in zip(actors, output.logprobs, output.tokens, strict=True) if PAD not in t]
    return max(float(np.abs(a - b).max()) for a, b in known)


def main(*, lora: bool = False) -> tuple[float, float]:
    """Trains two steps; returns the differences of log-probabilities before and after."""
    found = cluster(lora=lora)
    before = difference(found)
    options = grpo_learner.GRPOConfig(num_generations=2, beta=0.04)
    rewards = {"reward_fns": lambda prompts, completions, **_: [float(len(set(each))) for each in completions]}
    grpo_learner.GRPOLearner(rl_cluster=found, algo_config=options, **rewards).train([{"prompts": PROMPTS}] * 2)
    print(f"log-probabilities differ by {before:.1e} before and {(after := difference(found)):.1e} after two steps")
    return before, after


if __name__ == "__main__":
    main()
    main(lora=True)
