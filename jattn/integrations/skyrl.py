"""SkyRL-tx: `dot_product_attention` for its layers, and `Generator` instead of its models' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from skyrl.tx.utils.generator import GenerateOutput, find_string_stop_position  # pyright: ignore[reportMissingImports]

from jattn.integrations.skyrl_models import served
from jattn.llm.engine import LLM, SamplingParams
from jattn.nn import attention_fn


def dot_product_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, attention_mask: jax.Array, is_causal: bool, head_dim: int
) -> jax.Array:
    """Replaces `skyrl.tx.layers.attention.dot_product_attention`, with its arguments and gradients, for any head size.

    Args:
        q: float[batch, q_len, num_heads, head_dim].
        k, v: float[batch, kv_len, num_kv_heads, head_dim].
        attention_mask: [batch, kv_len], 1 for the valid tokens, which come first in each row.
        is_causal: hide later keys, in training and for prompts.
        head_dim: elements of one head.

    Returns:
        float[batch, q_len, num_heads, head_dim]; 0 in the rows of padding.
    """
    lengths = attention_mask.sum(1, dtype=jnp.int32)
    padding: Any = {"lengths": lengths} if is_causal else {"key_lengths": lengths}
    return attention_fn(q, k, v, is_causal=is_causal, scale=head_dim**-0.5, **padding)


class Generator:
    """Generates for a model of SkyRL-tx by the engine; the weights follow the model's.

    Args:
        model: see `jattn.integrations.skyrl_models.served`.
        max_model_len: most tokens of one sequence.
        engine_options: fields of `jattn.EngineConfig`.

    Attributes:
        llm: the engine with vLLM's interface.
    """

    def __init__(self, model: nnx.Module, *, max_model_len: int, **engine_options: Any) -> None:
        self._served = served(model, max_model_len=max_model_len)
        self.llm = LLM(self._served, **engine_options)

    def generate(
        self,
        input_ids: jax.typing.ArrayLike,
        attention_mask: jax.typing.ArrayLike,
        *,
        sampling_params: Sequence[Any],
        adapter_indices: jax.typing.ArrayLike | None = None,
        prompt_logprobs: bool = False,
        tokenizer: Any = None,
    ) -> Any:
        """Generates as `GeneratorMixin.generate` does, with its arguments and results.

        `adapter_indices` are int32[batch]; None is adapter 0, the base model's.

        Raises:
            InvalidInput: as `LLM.generate`; adapters of a model without any.
        """
        rows, lengths = np.asarray(input_ids), np.asarray(attention_mask).sum(1)
        prompts = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
        params = [
            SamplingParams(
                temperature=each.temperature,
                max_tokens=each.max_tokens,
                seed=each.seed % (1 << 32),
                top_k=each.top_k,
                top_p=each.top_p,
                stop_token_ids=each.stop_tokens or (),
                logprobs=0,
                prompt_logprobs=0 if prompt_logprobs else None,
            )
            for each in sampling_params
        ]
        adapters = np.zeros(len(prompts), int) if adapter_indices is None else np.asarray(adapter_indices)
        has_inputs = adapters.any() or self._served.paged_spec.inputs
        inputs = [{"adapter": int(each)} for each in adapters] if has_inputs else None
        outputs = self.llm.generate(prompts, params, inputs=inputs)
        result = GenerateOutput([], [], [], [] if prompt_logprobs else None)
        for asked, output in zip(sampling_params, outputs, strict=True):
            found: Any = output.outputs[0]
            tokens, reason = list(found.token_ids), found.finish_reason
            end = find_string_stop_position(tokens, tokenizer, asked.stop_strings) if asked.stop_strings else None
            if end is not None:
                tokens, reason = tokens[:end], "stop"
            result.generated_ids.append(tokens)
            result.stop_reasons.append(reason)
            result.logprobs.append([found.logprobs[index][token].logprob for index, token in enumerate(tokens)])
            if output.prompt_logprobs is not None:
                known: Any = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                result.prompt_logprobs.append([each[token].logprob for token, each in known])
        return result
