"""`Rollout`, a rollout engine for tunix: `ClusterConfig(rollout_engine=jattn.integrations.tunix.Rollout)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from jattn.integrations.tunix_models import served
from jattn.llm.engine import LLM, SamplingParams
from jattn.llm.models import Served
from torch_core.base.errors import InvalidInput


class Rollout(base_rollout.BaseRollout):
    """Generates for tunix with paged caches and continuous batching, from the actor's own arrays.

    Log-probabilities are those of the distribution that was sampled: temperature, top_k and top_p included. If actor
    and rollout share a mesh, the engine follows the optimizer's updates and has no weights of its own; else it has a
    copy on the first device of the rollout's mesh, and `update_params` replaces it.

    Args:
        rollout_actor: model of tunix; see `jattn.integrations.tunix_models.served` for the architectures.
        tokenizer: tunix's `TokenizerAdapter`.
        mesh: the rollout's mesh; None for the model's device.
        rollout_config: its `kv_cache_size` is the most tokens of a sequence, prompt included; its temperature is that
            of `get_per_token_logps`.
        serve: function `serve(model, max_model_len=)` that makes a model of another architecture one of the engine.
        engine_options: fields of `jattn.EngineConfig`, by `functools.partial(Rollout, max_num_seqs=64)`. On a GPU that
            a trainer shares, give `kv_cache_bytes`.

    Attributes:
        llm: the engine with vLLM's interface.

    Raises:
        Unsupported: an architecture without `serve`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: Any = None,
        *,
        serve: Callable[..., Served] = served,
        **engine_options: Any,
    ) -> None:
        config = base_rollout.RolloutConfig() if rollout_config is None else rollout_config
        self._tokenizer, self._temperature = tokenizer, config.temperature or 1.0
        graph, state = nnx.split(rollout_actor)
        device = next(iter(jax.tree.leaves(state)[0].devices())) if mesh is None else mesh.devices.flat[0]
        if any(device not in leaf.devices() for leaf in jax.tree.leaves(state)):
            rollout_actor = nnx.merge(graph, jax.device_put(state, device))
        self._model = rollout_actor
        options = {"logprobs_mode": "processed_logprobs", **engine_options}
        with jax.default_device(device):
            # Kept here: the engine follows a model that is alive.
            self._served = serve(rollout_actor, max_model_len=config.kv_cache_size)
            self.llm = LLM(self._served, **options)

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> base_rollout.RolloutOutput:
        """Generates one completion for each prompt, by the sampling fields of the configuration.

        Returns:
            tunix's `RolloutOutput`; a final end-of-sequence token is among the tokens.
        """
        config = rollout_config
        token_ids = [self._encode(prompt) for prompt in prompts]
        params = SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            stop_token_ids=config.eos_tokens or [self.eos_id()],
            logprobs=0 if config.return_logprobs else None,
        )
        found = [each.outputs[0] for each in self.llm.generate(token_ids, params, rng=config.seed)]
        longest = max(map(len, token_ids))
        width = config.max_prompt_length or 0
        width = width if width >= longest else 1 << (longest - 1).bit_length()
        padded = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, ids in zip(padded, token_ids, strict=True):
            row[width - len(ids) :] = ids
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(list(each.token_ids)) for each in found],
            logits=None,
            tokens=[np.array(each.token_ids, np.int32) for each in found],
            left_padded_prompt_tokens=padded,
            logprobs=[sampled_logprobs(each) for each in found] if config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns float32[batch, tokens], the completions' log-probabilities by tunix's own pass, at the temperature of
        the configuration."""
        return common.compute_per_token_logps(
            *nnx.split(self._model),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            temperature=self._temperature,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces parameters of the model, all or some; the actor's own arrays are not copied."""
        own = {path: jax.tree.leaves(leaf)[0] for path, leaf in nnx.to_flat_state(nnx.state(self._model))}

        def placed(path: Any, array: jax.Array) -> jax.Array:
            if path not in own:
                raise InvalidInput("params", f"has {'.'.join(map(str, path))}", "the rollout's model lacks it")
            if (array.dtype, array.sharding) == (own[path].dtype, own[path].sharding):
                return array
            return jax.device_put(array.astype(own[path].dtype), own[path].sharding)

        given = [
            (path, jax.tree.map(lambda array, path=path: placed(path, array), leaf))
            for path, leaf in nnx.to_flat_state(params)
        ]
        nnx.update(self._model, nnx.from_flat_state(given))

    def pad_id(self) -> int:
        """Returns the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the end-of-sequence token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Returns the model that is sampled."""
        return self._model

    def _encode(self, text: str) -> list[int]:
        # As tunix's own sampler does.
        ids, first = list(self._tokenizer.encode(text)), self._tokenizer.bos_id()
        return [int(each) for each in self._tokenizer.dedup_bos_ids([first, *ids] if first else ids)]


def sampled_logprobs(completion: Any) -> np.ndarray:
    """Returns float32[tokens], the log-probabilities of a completion's tokens."""
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return np.array([found[token].logprob for found, token in pairs], np.float32)
