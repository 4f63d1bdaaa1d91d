"""LoraCall: the products of each row with the low-rank adapter of its slot, added to a linear layer's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int32

from torch_core.adapters.tiles import TILE_ROWS, most_tiles, row_tiles
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import QUERY_DTYPES, ArraySpec
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_starts

#: Most linear layers that share an input, as queries, keys and values do, and three more in Kimi's delta attention.
MAX_SLICES = 6
#: The largest rank of an adapter.
MAX_RANK = 256


@dataclass(frozen=True, kw_only=True)
class LoraCall(Call[A]):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) of a linear layer, one of several for each row.

    `y[t] += lora_b[slot] @ (lora_a[slot] @ x[t])` for every row t that has a slot; without y, the result `out` is the
    sum that would be added. Layers that share their input may be
    joined: the columns of slice i, `output_slices[i]` of them, belong to ranks `i * rank` to `(i + 1) * rank` of
    lora_a. Rows are named in the order of their slots, so that rows of a slot are multiplied together (Punica, Chen et
    al. 2023, arXiv:2310.18547); the names are those of vLLM's `lora_shrink` and `lora_expand`. Experts have a slot for
    each pair of an adapter and an expert. With `num_heads`, each head of a row is mapped by matrices of its own, as
    latent attention does in its absorbed form.

    Attributes:
        x: input of the linear layer; a row for each row of the result, or for several that follow one another, as a
            token's experts do.
        y: its results, of the dtype of `x` or float32; written. None for the products alone, of the dtype of `x`.
        lora_a: first matrices of each slot, those of all slices one after the other. An adapter of a lower rank is
            filled up with zeros. Those of heads are one after the other, or all heads have the same.
        lora_b: second matrices of each slot, multiplied with the adapter's scale (alpha / rank); those of heads as in
            lora_a.
        token_indices_sorted_by_lora_ids: the rows of the first slot, those of the second, and so on; entries after the
            last slot's are the rows without an adapter, which are not read if products are added to `y`. No row may
            occur twice.
        lora_token_start_loc: the place of each slot's first row there, and the end.
        output_slices: columns of each joined layer, at most six; together those of `y`, or of a head in it.
        num_heads: parts of a row of `x` and of `y`, of equal size.
        activation: "silu" for `silu(gate) * up` of two layers, gate and up, after the products; y is not written then.
        out: array for the result if y is None or there is an activation; None allocates a new one. Of the products
            alone, rows without an adapter are 0.
        lora_tiles: the tiles of up to TILE_ROWS rows of one slot, those of the rows without a slot last, which programs
            would else search: slot, place of the first row, the place behind the slot's last row, and from number
            16 on the rows, any behind the last. Tiles behind the last have slot
            `num_slots + 1`. None for none.
    """

    name: ClassVar[str] = "add_lora_linear"

    x: Float[A, "num_inputs in_size"]
    y: Float[A, "num_rows out_size"] | None
    lora_a: Float[A, "num_slots all_ranks size_of_head"]
    lora_b: Float[A, "num_slots second_rows rank"]
    token_indices_sorted_by_lora_ids: Int32[A, "num_rows"]
    lora_token_start_loc: Int32[A, "num_slots+1"]
    output_slices: tuple[int, ...]
    num_heads: int = 1
    activation: str | None = None
    out: Float[A, "num_rows num_columns"] | None = None
    lora_tiles: Int32[A, "num_tiles tile_size"] | None = None

    @property
    def num_slots(self) -> int:
        """Adapters that rows may have."""
        return self.lora_b.shape[0]

    @property
    def rank(self) -> int:
        """Rank of each slot."""
        return self.lora_b.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return self.token_indices_sorted_by_lora_ids.shape[0]

    @property
    def rows_of_input(self) -> int:
        """Rows of the result for each row of `x`."""
        return self.num_rows // max(1, self.x.shape[0])

    @property
    def first_heads(self) -> int:
        """Heads with a first matrix of their own; 1 if all have the same."""
        return self.lora_a.shape[1] // (len(self.output_slices) * self.rank)

    @property
    def second_heads(self) -> int:
        """Heads with a second matrix of their own; 1 if all have the same."""
        return self.lora_b.shape[1] // sum(self.output_slices)

    @property
    def is_empty(self) -> bool:
        """There is no row."""
        return self.num_rows == 0

    @property
    def adds(self) -> bool:
        """The products are added to `y`, in place."""
        return self.y is not None and self.activation is None

    @property
    def written(self) -> tuple[str, ...]:
        """The results of the linear layer, or a given `out`."""
        return ("y",) if self.adds else () if self.out is None else ("out",)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given or products are added to `y`."""
        return {} if self.written else {"out": self.result}

    @property
    def result(self) -> ArraySpec:
        """Shape and dtype of `out`."""
        columns = self.num_heads * sum(self.output_slices) // (1 if self.activation is None else 2)
        return ArraySpec((self.num_rows, columns), dtype_name(self.x))

    @property
    def work(self) -> int:
        """The products of all rows."""
        columns = self.num_heads * sum(self.output_slices)
        return self.num_rows * self.rank * (len(self.output_slices) * self.x.shape[1] + columns)

    def check_options(self) -> None:
        """Checks ranks, slices and the dtypes that go together."""
        slices, dtype = self.output_slices, dtype_name(self.x)
        if not isinstance(slices, tuple) or not all(isinstance(size, int) and size > 0 for size in slices):
            raise InvalidInput("output_slices", value=slices, wanted="it must be a tuple of numbers of columns")
        heads, (ranks, size), rows = self.num_heads, self.lora_a.shape[1:], self.lora_b.shape[1]
        if not isinstance(heads, int) or heads < 1 or heads * size != self.x.shape[1]:
            wanted = f"it must be the {self.x.shape[1]} columns of x, divided by the {size} of lora_a"
            raise InvalidInput("num_heads", value=heads, wanted=wanted)
        columns = heads * sum(slices) if self.y is None else self.y.shape[1]
        fits = heads * sum(slices) == columns and rows in (columns // heads, columns)
        if not 1 <= len(slices) <= MAX_SLICES or not fits:
            of_all = f"y's {columns} columns" if self.y is not None else f"lora_b's {rows} rows"
            wanted = f"it must be 1 to {MAX_SLICES} numbers whose sum is {of_all}" + (", by heads" if heads > 1 else "")
            raise InvalidInput("output_slices", value=slices, wanted=wanted)
        if self.num_rows % max(1, self.x.shape[0]) or (self.num_rows > 0) != (self.x.shape[0] > 0):
            wanted = f"the {self.num_rows} of token_indices_sorted_by_lora_ids must be as many for each"
            raise InvalidInput("x", f"has {self.x.shape[0]} rows", wanted)
        num_tiles = most_tiles(self.num_rows, self.num_slots + 1, TILE_ROWS)
        if self.lora_tiles is not None and tuple(self.lora_tiles.shape) != (num_tiles, 2 * TILE_ROWS):
            problem = f"has shape {list(self.lora_tiles.shape)}"
            raise InvalidInput("lora_tiles", problem, f"of these rows and slots it is {[num_tiles, 2 * TILE_ROWS]}")
        if not 1 <= self.rank <= MAX_RANK:
            raise InvalidInput("lora_b", f"has rank {self.rank}", f"it must be from 1 to {MAX_RANK}")
        if ranks not in (len(slices) * self.rank, heads * len(slices) * self.rank):
            problem = f"has {ranks} rows in a slot"
            raise InvalidInput("lora_a", problem, f"{len(slices)} slices of rank {self.rank} have as many each")
        if 0 in (*self.lora_a.shape, *self.lora_b.shape):
            raise InvalidInput("lora_a", f"has shape {list(self.lora_a.shape)}", "no size may be 0")
        if dtype not in (*QUERY_DTYPES, "float64"):
            raise InvalidInput("x", f"is {dtype}", "it must be float32, bfloat16 or float16. Cast it")
        for name in ("lora_a", "lora_b"):
            if (found := dtype_name(getattr(self, name))) != dtype:
                raise InvalidInput(name, f"is {found}", f"it must be {dtype}, as x is")
        if self.y is not None and (found := dtype_name(self.y)) not in (dtype, "float32"):
            raise InvalidInput("y", f"is {found}", f"it must be {dtype}, as x is, or float32")
        if self.activation is not None:
            if self.activation != "silu":
                raise InvalidInput("activation", value=self.activation, wanted="it must be None or 'silu'")
            if self.y is None or heads > 1 or len(slices) != 2 or slices[0] != slices[1]:
                wanted = "it takes y, and two slices of equal size, gate and up, and no heads"
                raise InvalidInput("activation", value=self.activation, wanted=wanted)
        if self.out is not None and (
            self.adds or tuple(self.out.shape) != self.result.shape or dtype_name(self.out) != dtype
        ):
            problem = f"is {dtype_name(self.out)}{list(self.out.shape)}"
            wanted = f"it takes a result that is not added to y, {dtype}{list(self.result.shape)}"
            raise InvalidInput("out", problem, wanted)

    def check_values(self) -> None:
        """Checks the starts of slots, and that every row occurs once at most."""
        num_rows = self.num_rows
        rows_in = "token_indices_sorted_by_lora_ids"
        check_starts("lora_token_start_loc", self.lora_token_start_loc, num_rows, rows_in=rows_in)
        used = np.asarray(self.token_indices_sorted_by_lora_ids)
        used = used if not self.adds else used[: int(self.lora_token_start_loc[-1])]
        seen = np.zeros(num_rows, bool)
        for place, row in enumerate(used.tolist()):
            if not 0 <= row < num_rows:
                raise InvalidInput(f"{rows_in}[{place}]", value=row, wanted=f"rows are 0 to {num_rows - 1}")
            if seen[row]:
                raise InvalidInput(f"{rows_in}[{place}]", f"is {row} again", "a row has one adapter at most")
            seen[row] = True
        if self.lora_tiles is not None:
            self._check_tiles()

    def _check_tiles(self) -> None:
        """Checks the table of tiles; rows behind a tile's last are not used."""
        order, starts = (
            np.asarray(each) for each in (self.token_indices_sorted_by_lora_ids, self.lora_token_start_loc)
        )
        wanted, given = row_tiles(order, starts, np), np.asarray(self.lora_tiles)
        live = wanted[:, 1:2] + np.arange(TILE_ROWS) < wanted[:, 2:3]
        same = (given == wanted)[:, :3].all(1) & ((given == wanted)[:, TILE_ROWS:] | ~live).all(1)
        same = np.where(wanted[:, 0] > self.num_slots, given[:, 0] > self.num_slots, same)
        if not same.all():
            place = int((~same).argmax())
            raise InvalidInput(f"lora_tiles[{place}]", value=given[place].tolist(), wanted="see AdapterRows.of")
