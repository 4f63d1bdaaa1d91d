"""Texts and pairs of texts as token ids with special tokens, cut to the length that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jattn.llm.load import TextTokenizer
from jattn.llm.text.prompts import Prompt, encoded
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, RequestTooLong

# One of them is a token of any vocabulary.
_PROBES = ("a", "0", ".", "the")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Token ids of a text or of a pair, and for each id the kind of its text: 0 for the first, 1 for the second."""

    token_ids: list[int]
    types: list[int]


def as_pieces(
    tokenizer: TextTokenizer, texts: Sequence[tuple[str, ...]], most: int, *, cut: int | None = None
) -> list[Pieces]:
    """Returns each text, or pair of texts, as the tokenizer's post-processor joins it.

    Args:
        tokenizer: tokenizer of the model.
        texts: tuples of one text or two, all of one length.
        most: most token ids of the model.
        cut: cut the ends of longer texts, of a pair that of the longer one first ("longest_first" of the tokenizers
            library), so that no more than this many ids are left; -1 for `most`, None to refuse them.

    Raises:
        InvalidInput: a text has lone surrogates; `cut` is out of range, or has no room for a text.
        RequestTooLong: there are more ids than `most`.
    """
    if not isinstance(cut, int | None):
        check_int("truncate_prompt_tokens", cut, 1, also=", or -1")
    limit = most if cut in (None, -1) else min(cut, most)
    frame = _Frame(tokenizer, len(texts[0]))
    room = limit - frame.num_special
    if cut is not None and (cut < -1 or room < len(texts[0])):
        wanted = f"it must be -1, or at least {frame.num_special + len(texts[0])}"
        raise InvalidInput("truncate_prompt_tokens", value=cut, wanted=wanted)
    found = []
    for index, each in enumerate(texts):
        parts = [tokenizer.encode(text, add_special_tokens=False) for text in each]
        count = sum(map(len, parts))
        if count > room:
            if cut is None:
                problem = f"has {count + frame.num_special} tokens"
                wanted = f"the model reads {most} at most; truncate_prompt_tokens=-1 cuts it"
                raise RequestTooLong(f"prompts[{index}]", problem, wanted)
            parts = [part[:size] for part, size in zip(parts, _sizes(list(map(len, parts)), room), strict=True)]
        found.append(frame.joined(parts))
    return found


def cut_prompt(prompt: Prompt, tokenizer: TextTokenizer | None, most: int, cut: int) -> Sequence[int]:
    """Returns the token ids of a prompt, whose end is cut; `most` and `cut` are as in `as_pieces`."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str) and len(prompt) == 1:
        prompt = prompt["prompt"]
    if tokenizer is not None and isinstance(prompt, str):
        return as_pieces(tokenizer, [(prompt,)], most, cut=cut)[0].token_ids
    if cut != -1:
        check_int("truncate_prompt_tokens", cut, 1, also=", or -1")
    token_ids, _ = encoded(prompt, tokenizer)
    return token_ids[: most if cut == -1 else min(cut, most)]


class _Frame:
    """The special tokens around a text or a pair, from the encoding of a short one."""

    def __init__(self, tokenizer: TextTokenizer, num_texts: int) -> None:
        for probe in _PROBES:
            found = tokenizer.tokenizer.encode(probe, probe if num_texts > 1 else None)
            places = found.sequence_ids
            if all(index in places for index in range(num_texts)):
                break
        else:
            raise InvalidInput("the tokenizer has no tokens for the texts that its special tokens are found with.")
        self._places, self._ids, self._types = places, found.ids, found.type_ids
        self.num_special = places.count(None)

    def joined(self, parts: Sequence[Sequence[int]]) -> Pieces:
        token_ids: list[int] = []
        types: list[int] = []
        seen = set()
        for place, token, kind in zip(self._places, self._ids, self._types, strict=True):
            if place is None:
                token_ids.append(token)
                types.append(kind)
            elif place not in seen:
                seen.add(place)
                token_ids += parts[place]
                types += [kind] * len(parts[place])
        return Pieces(token_ids, types)


def _sizes(sizes: list[int], room: int) -> list[int]:
    """Returns how many ids of each text are left: of the longer one as many go as make both fit."""
    if len(sizes) == 1:
        return [room]
    shorter, half = min(sizes), room // 2
    short = min(shorter, half)
    long = room - short
    return [short, long] if sizes[0] <= sizes[1] else [long, short]
