"""DeepSeek's sparse attention (V3.2): an indexer scores keys, and each query attends to the latents that it chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from torch_core.attention.checks import check_static
from torch_core.base.checks import check_int, check_positive
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES, ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_starts, check_tables


@dataclass(frozen=True, kw_only=True)
class IndexerCall(Call[A]):
    """Scores of the keys of an indexer for every query: `sum over heads of weight * relu(scale * query @ key)`.

    A query sees the keys up to its own position, as under a causal mask that is aligned bottom-right; the scores of
    others, and of rows of padding, are -inf.

    Attributes:
        query: rotated queries of the indexer's heads.
        weights: weights of the heads, for each query.
        key_cache: one key for each slot, which all heads share; block 0 is the null block.
        block_tables: block ids of each sequence, in order.
        seq_lens: tokens of each sequence in the cache, including the new ones; 0 for a padding row.
        query_start_loc: cumulative sum of the query lengths, starting with 0.
        k_scale: dequantisation scale of a quantised key; None for 1.
        scale: positive factor on the products of queries and keys.
        max_query_len: upper bound on the query lengths, in tokens.
    """

    name: ClassVar[str] = "indexer_logits"

    query: Float[A, "num_tokens index_heads index_head_size"]
    weights: Float32[A, "num_tokens index_heads"]
    key_cache: Shaped[A, "num_blocks block_size index_head_size"]
    block_tables: Int32[A, "num_seqs max_blocks"]
    seq_lens: Int32[A, "num_seqs"]
    query_start_loc: Int32[A, "num_seqs+1"]
    k_scale: Float32[A, "1"] | float | None = None
    scale: float
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        """Query rows, padding included."""
        return self.query.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.key_cache.shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key_cache.shape[0]

    @property
    def table_tokens(self) -> int:
        """Tokens that a row of the block tables can hold, and so scores of a query."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def is_empty(self) -> bool:
        """There is no score."""
        return self.num_tokens == 0 or self.table_tokens == 0

    def check_values(self) -> None:
        """Checks offsets, lengths and block ids."""
        lens = check_starts("query_start_loc", self.query_start_loc, self.num_tokens, self.max_query_len)
        check_tables(
            self.block_tables, self.seq_lens, num_blocks=self.num_blocks, block_size=self.block_size, query_lens=lens
        )

    def check_statics(self) -> None:
        """Checks the numbers that must be plain ones."""
        check_static("max_query_len", self.max_query_len)
        check_positive("scale", self.scale)

    def check_options(self) -> None:
        """Checks sizes and the dtypes that go together."""
        if 0 in (*self.query.shape[1:], *self.key_cache.shape):
            problem = f"has shape {list(self.query.shape)} and key_cache {list(self.key_cache.shape)}"
            raise InvalidInput("query", problem, "there must be at least one head, one element and one slot")
        query, key = dtype_name(self.query), dtype_name(self.key_cache)
        if query not in QUERY_DTYPES or key not in (query, *FP8_DTYPES, "int8"):
            wanted = "give a query of float32, bfloat16 or float16, and keys of the same or quantised to 8 bits"
            raise InvalidInput("query", f"is {query} and key_cache {key}", wanted)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `logits`: the score of every place of a table, query by query."""
        return {"logits": ArraySpec((self.num_tokens, self.table_tokens), "float32")}


@dataclass(frozen=True, kw_only=True)
class ChoiceCall(Call[A]):
    """Where in the cache chosen keys lie: each query's slots side by side, in the order of their choice.

    Attributes:
        topk_indices: positions of the keys in the query's sequence, each once; negative ones are no keys, and neither
            are those of rows of padding.
        block_tables: block ids of each sequence, in order.
        query_start_loc: cumulative sum of the query lengths, starting with 0.
        block_size: tokens of a block.
    """

    name: ClassVar[str] = "chosen_slots"

    topk_indices: Int32[A, "num_tokens topk"]
    block_tables: Int32[A, "num_seqs max_blocks"]
    query_start_loc: Int32[A, "num_seqs+1"]
    block_size: int

    @property
    def is_empty(self) -> bool:
        """There is no query."""
        return self.topk_indices.shape[0] == 0

    def check_statics(self) -> None:
        """Checks that a block has a size."""
        check_int("block_size", self.block_size, 1)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns attention's arrays: `slots`, 0 after the last; their number, `counts`; `starts`, 0 to num_tokens."""
        num_tokens, topk = self.topk_indices.shape
        shapes = {"slots": (num_tokens, topk), "counts": (num_tokens,), "starts": (num_tokens + 1,)}
        return {name: ArraySpec(shape, "int32") for name, shape in shapes.items()}


def choice_of(call: LatentCall[A], topk_indices: A) -> ChoiceCall[A]:
    """Returns the call whose results `chosen_latents` takes.

    Raises:
        InvalidInput: shapes or dtypes that do not fit.
        Unsupported: a window or chunked attention.
    """
    check_choice(call, topk_indices)
    return ChoiceCall(
        topk_indices=topk_indices,
        block_tables=call.block_tables,
        query_start_loc=call.query_start_loc,
        block_size=call.block_size,
    )


def chosen_latents(call: LatentCall[A], chosen: Mapping[str, A]) -> LatentCall[A]:
    """Returns a latent call's attention of each query to the keys that it chose.

    As a batch of sequences of one query each, over blocks of one token: a row of the table is the chosen slots.

    Args:
        call: the attention to all keys; its mask gives way to the choice.
        chosen: the results of `choice_of`'s call.
    """
    cache = call.latent_cache
    return replace(
        call,
        latent_cache=cache.reshape(cache.shape[0] * cache.shape[1], 1, cache.shape[2]),
        block_tables=chosen["slots"],
        seq_lens=chosen["counts"],
        query_start_loc=chosen["starts"],
        spec=replace(call.spec, causal=False),
        max_query_len=1,
    )


def check_choice(call: LatentCall[A], topk_indices: A) -> None:
    """Checks shapes and options of a choice of keys.

    Raises:
        InvalidInput, Unsupported: see `choice_of`.
    """
    shape, spec = tuple(topk_indices.shape), call.spec
    if len(shape) != 2 or shape[0] != call.num_tokens or shape[1] < 1 or dtype_name(topk_indices) != "int32":
        wanted = f"it must be int32 [{call.num_tokens}, topk], positions for each row of query"
        raise InvalidInput("topk_indices", f"is {dtype_name(topk_indices)} of shape {list(shape)}", wanted)
    if (spec.window_left, spec.window_right, spec.attention_chunk) != (None, None, None):
        raise Unsupported("a window or attention_chunk is given; chosen keys are the whole mask: leave it.")


def check_chosen_values(call: LatentCall[Any], topk_indices: Any) -> None:
    """Checks the positions themselves, of arrays that numpy can read.

    Raises:
        InvalidInput: a position that the query's sequence does not have.
    """
    check_choice(call, topk_indices)
    indices, starts, lens = (np.asarray(x) for x in (topk_indices, call.query_start_loc, call.seq_lens))
    tokens = np.repeat(lens, np.diff(starts))
    rows = indices[: len(tokens)]
    bad = rows >= tokens[:, None]
    if bad.any():
        token, place = np.argwhere(bad)[0].tolist()
        raise InvalidInput(
            f"topk_indices[{token}, {place}] is {rows[token, place]}; the query's sequence has {tokens[token]} tokens. "
            "Use -1 for an entry without a key."
        )
