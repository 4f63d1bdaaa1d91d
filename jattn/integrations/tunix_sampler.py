"""`Sampler`, an engine with the newer sampler protocol of tunix (`tunix.experimental.rollout.sampler`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.experimental.rollout import sampler as protocol  # pyright: ignore[reportMissingImports]

from jattn.integrations.tunix import sampled_logprobs
from jattn.integrations.tunix_models import served
from jattn.llm.engine import LLM, SamplingParams
from jattn.llm.models import Served
from torch_core.base.errors import InvalidInput


class Sampler:
    """Samples for tunix's rollout workers: requests of concurrent calls are batched together.

    Args:
        server_id, max_model_len: name of this sampler, and the most tokens of one sequence.
        model, serve, engine_options: as of `jattn.integrations.tunix.Rollout`, whose attribute `llm` this has, too.
        tokenizer: a tokenizer of Hugging Face, or tunix's `TokenizerAdapter`, for prompts that are texts or messages.
    """

    def __init__(
        self,
        server_id: str,
        model: nnx.Module,
        tokenizer: Any = None,
        *,
        max_model_len: int = 1024,
        serve: Callable[..., Served] = served,
        **engine_options: Any,
    ) -> None:
        self.server_id, self.tokenizer = server_id, tokenizer
        self._served = serve(model, max_model_len=max_model_len)
        self.llm = LLM(self._served, **{"logprobs_mode": "processed_logprobs", **engine_options})
        self._runs = asyncio.Event()
        self._runs.set()

    def initialize(self) -> None:
        """Does nothing: the engine is ready."""

    async def start(self, *_: Any, **__: Any) -> bool:
        """Returns True: the engine is ready, and weights may be replaced between any two steps."""
        return True

    pre_weight_sync = post_weight_sync = start

    async def stop(self, **_: Any) -> None:
        """Closes the engine."""
        await asyncio.to_thread(self.llm.close)

    async def pause(self, **_: Any) -> bool:
        """Holds later calls of `sample` back until `resume`."""
        self._runs.clear()
        return True

    async def resume(self, **_: Any) -> bool:
        """Ends a pause."""
        self._runs.set()
        return True

    async def get_mesh(self, **_: Any) -> None:
        """Returns None: arrays are passed within the process, on one device."""

    bind_weight_sync = get_mesh

    async def sample(self, sampling_requests: Any, **_: Any) -> Any:
        """Samples a `SamplingRequest` (a text, token ids or messages), or a list of them, each with its parameters.

        Returns:
            A `SamplingResponse`, or a list of them. `metadata["policy_versions"]` has the versions of the weights that
            sampled the tokens.
        """
        await self._runs.wait()
        is_one = not isinstance(sampling_requests, list | tuple)
        requests = [sampling_requests] if is_one else list(sampling_requests)
        prompts = [self._encode(getattr(each, "prompt", each)) for each in requests]
        wanted = [getattr(each, "sampling_params", None) or protocol.SamplingParams() for each in requests]
        outputs = await asyncio.to_thread(self.llm.generate, prompts, list(map(_params, wanted)))
        responses = [
            protocol.SamplingResponse(
                request_id=getattr(request, "request_id", ""),
                text="" if self.tokenizer is None else self.tokenizer.decode(list(found.token_ids)),
                prompt_token_ids=np.array(output.prompt_token_ids, np.int32),
                token_ids=np.array(found.token_ids, np.int32),
                logprobs=None if found.logprobs is None else sampled_logprobs(found),
                finish_reason=found.finish_reason,
                metadata={"policy_versions": found.weights_versions},
            )
            for request, output in zip(requests, outputs, strict=True)
            for found in output.outputs
        ]
        return responses[0] if is_one else responses

    async def get_weight_sync_metadata(self, **_: Any) -> dict[str, Any]:
        """Returns shape, dtype and sharding of each parameter, by its path with dots."""
        flat = nnx.to_flat_state(nnx.state(self._served.model))
        arrays = {".".join(map(str, path)): jax.tree.leaves(leaf)[0] for path, leaf in flat}
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}

    async def weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Replaces the weights between two steps; unfinished requests go on with the new ones.

        `sync_request.extra_config["weights"]` is a state of the model, whole or in part; without it the weights are
        those that the model has now. `policy_version` is their version.
        """
        given = getattr(sync_request, "extra_config", {}).get("weights")
        given = self._served.model if given is None else given
        version = getattr(sync_request, "policy_version", None)
        options: Any = {"partial": True, "prefix": "model", "cast": True, "version": version}
        await asyncio.to_thread(self.llm.update_weights, given, **options)
        return True

    async def get_transfer_status(self, *_: Any, **__: Any) -> str:
        """Returns "SUCCESS": `weight_sync` returns at the end of the transfer."""
        return "SUCCESS"

    async def migrate_kv_cache(self, *_: Any, **__: Any) -> bool:
        """Returns False: the other sampler computes the tokens again."""
        return False

    async def get_load_info(self, **_: Any) -> Any:
        """Returns the number of unfinished requests and the used part of the cache."""
        stats, running = self.llm.engine.cache_stats(), self.llm.engine.num_unfinished
        return protocol.LoadInfo(num_requests_running=running, kv_cache_usage_perc=stats.used / stats.num_blocks)

    def _encode(self, prompt: Any) -> list[int]:
        is_chat = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict)
        if is_chat or isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInput("prompt", "is text", "give the sampler a tokenizer, or token ids")
            as_chat = {"tokenize": False, "add_generation_prompt": True}
            prompt = self.tokenizer.apply_chat_template(list(prompt), **as_chat) if is_chat else prompt
            prompt = self.tokenizer.encode(prompt)
        return [int(each) for each in prompt]


def _params(asked: Any) -> SamplingParams:
    if asked.beam_size is not None or asked.return_logits:
        raise InvalidInput("sampling_params", "asks for beams or logits", "the engine has none: leave them out")
    names = ("max_tokens", "temperature", "seed", "top_p", "top_k")
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    return SamplingParams(**given, logprobs=0 if asked.return_logprobs else None)
