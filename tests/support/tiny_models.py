"""Tiny random models for tests: configs, weights with some spread, folders on disk, and their transformers twins."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jattn.llm.load import save_model
from jattn.llm.models import Decoder, ModelConfig
from jattn.llm.models.encoder_decoder import build_model
from jattn.metadata import AttentionMetadata

END_OF_TEXT = "<|endoftext|>"


def tiny_config(**changes: Any) -> ModelConfig:
    """Returns a config of two small layers; 257 tokens: the bytes and an end-of-text token (id 0)."""
    options: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_ids": (0,),
    }
    return ModelConfig(**(options | changes))


def tiny_model(config: ModelConfig, seed: int, implementation: str | None = "xla") -> Decoder:
    """Returns a decoder whose weights are large enough that every part of it shows in the logits."""
    random = np.random.default_rng(seed)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(seed), implementation=implementation))
    )
    filled = []
    for path, variable in nnx.to_flat_state(state):
        centre = 1.0 if path[-1] == "weight" else 0.0
        value = random.normal(centre, 0.1, variable.shape)
        filled.append((path, variable.replace(jnp.asarray(value, config.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer of single bytes, with end-of-text as id 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END_OF_TEXT: 0} | {character: 1 + index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tiny_model(folder: Path, seed: int, *, dtype: str | None = None, **changes: Any) -> Path:
    """Writes a tiny random model with its tokenizer and returns the folder."""
    config = tiny_config(**changes)
    save_model(folder, tiny_model(config, seed), config, byte_tokenizer(), dtype=dtype)
    return folder


def transformers_logits(folder: Path, token_ids: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Returns transformers' logits [batch, tokens, vocab_size] for int[batch, tokens]; skips without transformers."""
    return next(transformers_runs(folder, token_ids, dtype))


def transformers_runs(folder: Path, token_ids: np.ndarray, dtype: str = "float32") -> Iterator[np.ndarray]:
    """Yields the same, then again and again of weights that are each one unit in the last place away."""
    import pytest

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    # The eager way of transformers 5 adds Falcon's ALiBi to the mask and to the scores, so twice.
    attend = "sdpa" if config.model_type == "falcon" else "eager"
    # Some classes have no place in the list of automatic ones, and InternLM 3 has no class.
    kind = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
    model = kind.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attend, experts_implementation="eager"
    ).eval()
    # Its delta rule is float32 in models of every dtype, which is no truth for float32.
    is_exact = dtype == "float64" and hasattr(config, "linear_conv_kernel_dim")
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    while True:
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if is_exact:
                patch.setattr(torch, "float32", torch.float64)
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            logits = model(torch.from_numpy(token_ids.astype(np.int64))).logits.double().numpy()
        yield logits
        with torch.no_grad():
            for parameter, weight in weights:
                way = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                parameter.copy_(torch.nextafter(weight, way * torch.full_like(weight, torch.inf)))


def reference_bound(reference: np.ndarray, same_dtype: np.ndarray, epsilon: float = 2.0**-23) -> float:
    """Returns the error that is allowed against a float64 reference: twice that of a same-dtype one, and its eps."""
    return 2 * (np.abs(same_dtype - reference).max() + epsilon * np.abs(reference).max())


def dense_logits(model: Decoder, tokens: np.ndarray, padded_to: int = 24) -> np.ndarray:
    """Returns the dense forward's logits [tokens, vocab_size] of one sequence; compiled once per padded length."""
    padded = np.zeros(padded_to, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense(*nnx.split(model), padded[None]))[0, : len(tokens)]


class PagedRun:
    """Feeds sequences through a decoder's paged path, step by step, over a cache whose unused slots are NaN.

    Steps have the same padded shapes by default, so that tests share what they compile.

    Args:
        model: the decoder.
        num_seqs: rows of the batch; a step may use fewer.
        max_len: tokens that each sequence may reach.
        block_size: tokens of one block.
        order: permutation of the blocks, to place the sequences elsewhere; None for the natural order.
    """

    def __init__(
        self,
        model: Decoder,
        num_seqs: int = 4,
        max_len: int = 24,
        block_size: int = 8,
        order: np.ndarray | None = None,
    ) -> None:
        self.graph, self.state = nnx.split(model)
        self.block_size = block_size
        width = -(-max_len // block_size)
        blocks = np.arange(1, 1 + num_seqs * width, dtype=np.int32)
        self.block_tables = (blocks if order is None else blocks[order]).reshape(num_seqs, width)
        self.lengths = np.zeros(num_seqs, np.int32)
        spec = model.paged_spec
        specs = spec.cache_specs(block_size) + spec.further_specs(block_size)
        self.caches = tuple(jnp.full(one.shape(1 + num_seqs * width), jnp.nan, one.dtype) for one in specs)
        for one in spec.states:
            arrays = zip(one.array_shapes(1 + num_seqs), one.dtypes, strict=True)
            self.caches += tuple(jnp.full(shape, jnp.nan, dtype) for shape, dtype in arrays)

    def step(
        self, new_tokens: list[np.ndarray], num_tokens: int = 32, max_query_len: int | None = None
    ) -> list[np.ndarray]:
        """Runs one step with these new tokens of the first sequences; returns the logits of each one's new tokens."""
        arguments = self.arguments(new_tokens, num_tokens, max_query_len)
        logits, self.caches = paged_step(self.graph, self.state, *arguments)
        ends = np.cumsum([len(tokens) for tokens in new_tokens])
        return np.split(np.asarray(logits)[: ends[-1]], ends[:-1])

    def arguments(self, new_tokens: list[np.ndarray], num_tokens: int, max_query_len: int | None) -> tuple[Any, ...]:
        """Returns what the model is called with, padded to `num_tokens`, and counts the tokens as computed."""
        counts = np.zeros(len(self.lengths), np.int32)
        counts[: len(new_tokens)] = [len(tokens) for tokens in new_tokens]
        padding = num_tokens - int(counts.sum())
        places = [np.arange(done, done + count) for done, count in zip(self.lengths, counts, strict=True)]
        slots = [
            table[place // self.block_size] * self.block_size + place % self.block_size
            for table, place in zip(self.block_tables, places, strict=True)
        ]
        self.lengths = self.lengths + counts
        metadata = AttentionMetadata(
            block_tables=jnp.asarray(self.block_tables),
            seq_lens=jnp.asarray(self.lengths),
            query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
            slot_mapping=jnp.asarray(np.concatenate([*slots, np.full(padding, -1)]), jnp.int32),
            max_query_len=max_query_len or num_tokens,
            state_slots=jnp.arange(1, 1 + len(counts), dtype=jnp.int32),
        )
        token_ids = jnp.asarray(np.concatenate([*new_tokens, np.zeros(padding)]), jnp.int32)
        positions = jnp.asarray(np.concatenate([*places, np.zeros(padding)]), jnp.int32)
        return token_ids, positions, self.caches, metadata


# A step of a tiny model runs in a moment however it is compiled, and compiles in half the time.
_QUICK = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICK)
def paged_step(graph, state, token_ids, positions, caches, metadata):
    """One step of the paged path, compiled; returns the logits of every row and the new caches."""
    model = nnx.merge(graph, state)
    hidden, caches = model(token_ids, positions, caches, metadata)
    return model.logits(hidden), caches


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICK)
def _dense(graph, state, token_ids):
    return nnx.merge(graph, state).forward_dense(token_ids)
