"""How much longer a tokenizer makes a text: files whose parts let it grow without bound are refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from torch_core.base.errors import InvalidInput

#: Published tokenizers reach 36: Unicode's longest compatibility form has 18 characters, in a sequence with one regex.
_MOST = 256
_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")


def check_growth(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer a part of which may make more than 256 characters, or tokens, of one.

    Raises:
        InvalidInput: its argument is the part's name.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if _growth_of(getattr(tokenizer, name)) > _MOST:
            raise InvalidInput(name, "lets a text grow", f"it must become {_MOST} times as long at most")


def normalizer_growth(tokenizer: Tokenizer) -> float:
    """Returns the most characters that the normaliser gives for one, but for Unicode's own forms of it."""
    return _growth_of(tokenizer.normalizer)


def described_part(part: Any) -> dict[str, Any]:
    """Returns a part of a tokenizer as tokenizer.json has it."""
    # Pickle's protocol is the library's only way to say what a part is, short of writing the whole vocabulary.
    return json.loads(part.__getstate__())


def _growth_of(part: Any) -> float:
    return 1 if part is None else _growth(described_part(part))


def _growth(part: Mapping[str, Any]) -> float:
    """Returns an upper bound of the characters that a part makes of one."""
    kind = part["type"]
    for name in _SEQUENCES:
        if kind == "Sequence" and name in part:
            return math.prod(map(_growth, part[name]))
    if kind == "Replace":
        new = len(part["content"])
        # A regular expression may match nothing, at each character.
        return max(1, new / len(part["pattern"]["String"])) if part["pattern"].get("String") else 1 + new
    if kind == "ByteLevel":
        return 4
    if kind == "Precompiled" and part["precompiled_charsmap"]:
        blob = base64.b64decode(part["precompiled_charsmap"])
        # Google's format: the size of a trie, the trie, and the texts that its leaves name.
        texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    if kind == "TemplateProcessing":
        return sum("Sequence" in piece for piece in part["single"])
    return 1
