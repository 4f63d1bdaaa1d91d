"""StateCall: the fields and checks of ops over ragged sequences that each have a state in a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Bool, Int32

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import QUERY_DTYPES
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_starts


@dataclass(frozen=True, kw_only=True)
class StateCall(Call[A]):
    """An op over sequences with states. The slots are those of vLLM's operations for such layers.

    Attributes:
        query_start_loc: first row of each sequence, and the end of the last one; later rows are padding.
        cache_indices: slot of each sequence; a negative one is no slot: the sequence starts from zeros and its state
            is not kept. No two sequences with tokens share a slot. None for slot i for sequence i.
        has_initial_state: whether a sequence starts from the state in its slot; if False, from zeros, and the slot
            is not read. None for True.
        num_kept_tokens: tokens of each sequence whose state is kept; later ones, such as rejected proposals, have
            results and change no state, and with 0 the slot keeps its own. None for all.
    """

    #: The array with a row for each token, and the array with a state in each slot, which may be None.
    tokens_in: ClassVar[str]
    states_in: ClassVar[str]

    query_start_loc: Int32[A, "num_seqs+1"]
    cache_indices: Int32[A, "num_seqs"] | None = None
    has_initial_state: Bool[A, "num_seqs"] | None = None
    num_kept_tokens: Int32[A, "num_seqs"] | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences, those without tokens too."""
        return self.query_start_loc.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Rows, those of padding too."""
        return getattr(self, self.tokens_in).shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, or no sequence."""
        return self.num_tokens == 0 or self.num_seqs == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The states, and the results if they are given a place."""
        return tuple(name for name in (self.states_in, "out") if getattr(self, name) is not None)

    @property
    def splits_sequences(self) -> bool:
        """They can, where no states are kept: slots are not numbered by sequences."""
        return getattr(self, self.states_in) is None

    def rows_of_a_sequence(self) -> dict[str, int]:
        """Returns the tokens of each sequence where all can have as many as the longest."""
        longest = self.num_tokens // max(self.num_seqs, 1)
        is_even = longest * self.num_seqs == self.num_tokens and getattr(self, "max_query_len", longest) == longest
        return {"num_tokens": longest} if is_even else {}

    def check_values(self) -> None:
        """Checks offsets, slots and kept tokens."""
        lens = check_starts(
            "query_start_loc",
            self.query_start_loc,
            self.num_tokens,
            getattr(self, "max_query_len", None),
            rows_in=self.tokens_in,
        )
        if self.num_kept_tokens is not None:
            for seq, kept in enumerate(self.num_kept_tokens.tolist()):
                if not 0 <= kept <= lens[seq]:
                    wanted = f"it must be from 0 to {lens[seq]}, the tokens of the sequence"
                    raise InvalidInput(f"num_kept_tokens[{seq}]", value=kept, wanted=wanted)
        states = getattr(self, self.states_in)
        if states is None or self.cache_indices is None:
            return
        num_states, owners = states.shape[0], {}
        for seq, slot in enumerate(self.cache_indices.tolist()):
            if slot >= num_states:
                wanted = f"{self.states_in} has slots 0 to {num_states - 1}"
                raise InvalidInput(f"cache_indices[{seq}]", value=slot, wanted=wanted)
            if slot >= 0 and lens[seq] > 0 and owners.setdefault(slot, seq) != seq:
                problem = f"is {slot}, the slot of sequence {owners[slot]} too"
                raise InvalidInput(f"cache_indices[{seq}]", problem, "give each its own")

    def check_states(self) -> None:
        """Checks that slots and states are given together, and that there is a slot for each sequence."""
        states: Any = getattr(self, self.states_in)
        if states is None:
            for name in ("cache_indices", "has_initial_state", "num_kept_tokens"):
                if getattr(self, name) is not None:
                    raise InvalidInput(name, f"is given without {self.states_in}", "give both or neither")
        elif self.cache_indices is None and states.shape[0] < self.num_seqs:
            wanted = "give cache_indices"
            raise InvalidInput(self.states_in, f"has {states.shape[0]} slots for {self.num_seqs} sequences", wanted)

    def check_dtypes(self, *names: str) -> None:
        """Checks that arrays are of 16 or 32 bits, or of 64 with tokens of 64."""
        dtype = dtype_name(getattr(self, self.tokens_in))
        for name in names:
            array = getattr(self, name)
            if array is not None and dtype_name(array) not in (*QUERY_DTYPES, dtype if dtype == "float64" else ""):
                wanted = f"it must be float32, bfloat16 or float16, or float64 with {self.tokens_in}"
                raise InvalidInput(name, f"is {dtype_name(array)}", wanted)
