"""Which keys can matter to a run of query rows, and the additive float32 mask over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import AttentionCall, DenseCall
from torch_core.attention.cpu.gather import raw_array
from torch_core.attention.dropout import keep_factor, keep_mask
from torch_core.base.specs import AttentionSpec


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """The bias of a score by the distance of the key from its row.

    Attributes:
        slopes: float32 `[num_heads]` of ALiBi, or None.
        use_alibi_sqrt: the square-root form.
        biases: float32 `[num_heads, 2 * D + 1]` for the distances from -D to D, or None.
    """

    slopes: np.ndarray | None
    use_alibi_sqrt: bool
    biases: np.ndarray | None

    @classmethod
    def of(cls, call: AttentionCall[Tensor]) -> DistanceBias | None:
        """Returns that of a call, or None."""
        given = (call.alibi_slopes, call.relative_bias)
        slopes, biases = (None if array is None else raw_array(array.float()) for array in given)
        return None if slopes is biases is None else cls(slopes, call.spec.use_alibi_sqrt, biases)

    def at(self, distances: np.ndarray) -> np.ndarray:
        """Returns `[num_heads, *distances.shape]` for float32 positions of keys minus those of their rows."""
        bias = np.float32(0)
        if self.slopes is not None:
            bias = self.slopes.reshape(-1, *[1] * distances.ndim) * self.alibi_form(distances)
        if self.biases is not None:
            furthest = self.biases.shape[1] // 2
            bias = bias + self.biases[:, np.clip(distances, -furthest, furthest).astype(np.int64) + furthest]
        return np.asarray(bias)

    def alibi_form(self, distances: np.ndarray) -> np.ndarray:
        """Returns the factor of the slopes."""
        return -np.sqrt(np.maximum(-distances, 0)) if self.use_alibi_sqrt else distances


@dataclass(frozen=True, slots=True)
class Extras:
    """One sequence's additions to an `AttentionSpec`; every field may be None.

    Attributes:
        causal: overrides `spec.causal`.
        mm_ranges: int `[ranges, 2]`, inclusive spans of bidirectional attention.
        bias: float32 `[rows, rows]`, between the new tokens.
        by_distance: bias by the distance of the key.
        dropout: int32 `[num_heads, 2]` seeds, and the rate.
    """

    causal: bool | None = None
    mm_ranges: np.ndarray | None = None
    bias: np.ndarray | None = None
    by_distance: DistanceBias | None = None
    dropout: tuple[np.ndarray, float] | None = None

    @classmethod
    def of(cls, call: AttentionCall[Tensor]) -> Extras:
        """Returns the fields that all sequences of a call share."""
        bias = None if call.qq_bias is None else raw_array(call.qq_bias.float())
        return cls(bias=bias, by_distance=DistanceBias.of(call))

    def of_sequence(self, call: AttentionCall[Tensor], seq: int) -> Extras:
        """Returns the additions of sequence number `seq`."""
        seeds = call.dropout_seeds if isinstance(call, DenseCall) else None
        if call.seq_causal is None and call.mm_prefix_range is None and seeds is None:
            return self
        return replace(
            self,
            causal=None if call.seq_causal is None else bool(call.seq_causal[seq]),
            mm_ranges=None if call.mm_prefix_range is None else call.mm_prefix_range[seq].numpy(),
            dropout=None if seeds is None else (seeds[seq].numpy(), call.dropout_rate),  # type: ignore[attr-defined]
        )

    @property
    def irregular(self) -> bool:
        """The keys of a row are no range, or their scores differ by more than their distance."""
        return self.mm_ranges is not None or self.bias is not None

    def dropped(self, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
        """Returns the factors of the weights, float32 `[num_heads, rows, keys]`; None without dropout."""
        if self.dropout is None:
            return None
        seeds, rate = self.dropout
        return torch.from_numpy(keep_mask(seeds, np.arange(*rows), keys, rate)).float().mul_(keep_factor(rate))

    def is_causal(self, spec: AttentionSpec) -> bool:
        """Whether this sequence has a causal mask."""
        return spec.causal if self.causal is None else self.causal


def first_key(position: int, key_len: int, spec: AttentionSpec) -> int:
    """Returns the first key that the row at a position, or any later one, may see."""
    low = 0
    if spec.window_left is not None:
        low = max(low, position - spec.window_left)
    if spec.attention_chunk is not None:
        low = max(low, position // spec.attention_chunk * spec.attention_chunk)
    return min(low, key_len)


def key_range(first_p: int, last_p: int, key_len: int, causal: bool, spec: AttentionSpec) -> tuple[int, int]:
    """Returns the first and last-plus-one key that some row at positions `first_p..last_p` may see.

    Example:
        >>> key_range(9, 9, 10, True, AttentionSpec(scale=1.0, window_left=3))
        (6, 10)
    """
    high = key_len
    if causal:
        high = min(high, last_p + 1)
    if spec.window_right is not None:
        high = min(high, last_p + spec.window_right + 1)
    if spec.attention_chunk is not None:
        high = min(high, (last_p // spec.attention_chunk + 1) * spec.attention_chunk)
    return first_key(first_p, key_len, spec), max(high, 0)


def first_row_with_keys(query_len: int, key_len: int, causal: bool, spec: AttentionSpec) -> int:
    """Returns the first query row that sees a key; all later rows see one too. Rows before position 0 may see none.

    Example:
        >>> first_row_with_keys(5, 3, True, AttentionSpec(scale=1.0))
        2
    """
    if key_len == 0:
        return query_len
    if causal or spec.attention_chunk is not None:
        return max(0, query_len - key_len)
    if spec.window_right is not None:
        return max(0, query_len - key_len - spec.window_right)
    return 0


def additive_mask(
    positions: tuple[int, int], keys: tuple[int, int], context_len: int, spec: AttentionSpec, extras: Extras
) -> np.ndarray:
    """Returns float32 `[num_heads or 1, rows, keys]`: the biases on visible keys and -inf on hidden ones.

    Args:
        positions: first and last-plus-one position of the query rows.
        keys: first and last-plus-one key.
        context_len: position of the sequence's first query row; may be negative.
        spec: the static options.
        extras: the additions of this sequence.
    """
    p = np.arange(*positions)[:, None]
    j = np.arange(*keys)[None, :]
    hidden = np.zeros((p.shape[0], j.shape[1]), bool)
    if extras.is_causal(spec):
        hidden |= j > p
    if spec.window_left is not None:
        hidden |= j < p - spec.window_left
    if spec.window_right is not None:
        hidden |= j > p + spec.window_right
    if spec.attention_chunk is not None:
        hidden |= j // spec.attention_chunk != p // spec.attention_chunk
    if extras.mm_ranges is not None:
        for first, last in extras.mm_ranges.tolist():
            if first < last:
                hidden &= ~((first <= p) & (p <= last) & (first <= j) & (j <= last))
    mask = np.zeros((1, *hidden.shape), np.float32)
    if extras.by_distance is not None:
        mask = extras.by_distance.at((j - p).astype(np.float32))
    if extras.bias is not None:
        first_new = max(context_len, keys[0])
        rows = slice(positions[0] - context_len, positions[1] - context_len)
        mask[:, :, first_new - keys[0] :] += extras.bias[rows, first_new - context_len : keys[1] - context_len]
    mask[:, hidden] = -np.inf
    return mask
