"""TextTokenizer: text to token ids and back through a folder's tokenizer.json."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from jattn.llm.load.folder import member, read_object, read_text
from jattn.llm.load.text_growth import check_growth, normalizer_growth
from jattn.llm.load.text_sizes import TextSizes, text_sizes
from jattn.llm.workers.pool import Task
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, JattnError, RequestTooLong, Unsupported

#: Where folders have their template of conversations with tools.
MORE_TEMPLATES, TOOL_TEMPLATE = "additional_chat_templates", "tool_use.jinja"

_NAME = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_MAX_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
# Bytes of a text after the normaliser, or token ids, that take milliseconds here.
_MOST_HERE = 1 << 14
_ENCODE = Task(
    module="tokens",
    function="encode",
    argument="prompt",
    subject="the text",
    fix="shorten it, or encode it in parts",
    seconds=30.0,
    memory_bytes=2 << 30,
)
_DECODE = replace(_ENCODE, function="decode", argument="tokens", subject="the list of token ids")


class TextTokenizer:
    """Encodes text as the model was trained on it; special tokens come from the file's own post-processor.

    Args:
        tokenizer: tokenizer of the `tokenizers` library; must not be changed afterwards.
        chat_template: Jinja template from a conversation to a prompt; it is kept and never run here.
        special_tokens: texts of the tokens that the model's folder names, as in {"bos_token": "<s>"}; for templates.
        tool_chat_template: the template of conversations with tools, if the folder has one of their own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._name = secrets.token_hex(8)
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template
        self.special_tokens = dict(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def within(self, vocab_size: int) -> TextTokenizer:
        """Returns the tokenizer without the added tokens beyond the model's vocabulary, which have no embedding."""
        if self.vocab_size <= vocab_size:
            return self
        largest = max(self.tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        if largest >= vocab_size:
            # Before the library writes the vocabulary, which takes memory for each id up to the largest.
            raise InvalidInput(_NAME, f"has token ids up to {largest}", f"vocab_size is {vocab_size}")
        described = json.loads(self.tokenizer.to_str())
        added = described["added_tokens"]
        described["added_tokens"] = [token for token in added if token["id"] < vocab_size]
        with tokenizer_failures(
            f"{_NAME} has added tokens above the model's {vocab_size}, and is invalid without them"
        ):
            rest = Tokenizer.from_str(json.dumps(described))
        found = TextTokenizer(rest, self.chat_template, self.special_tokens, self.tool_chat_template)
        if found.vocab_size > vocab_size:
            raise InvalidInput(_NAME, f"has token ids up to {found.vocab_size - 1}", f"vocab_size is {vocab_size}")
        names = [token["content"] for token in added if token["id"] >= vocab_size]
        warnings.warn(
            f"{_NAME} has added tokens that the model has no embedding for ({shown(names[:8])}); they are text like "
            "any other here.",
            stacklevel=3,
        )
        return found

    @functools.cached_property
    def _sizes(self) -> TextSizes:
        return text_sizes(self.tokenizer)

    @functools.cached_property
    def _growth(self) -> float:
        return normalizer_growth(self.tokenizer)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None, cut: bool = False
    ) -> list[int]:
        """Returns the token ids of the text.

        The library holds the interpreter's lock, so that a text of more than a few pages is encoded in another process.

        Args:
            text: the text.
            add_special_tokens: add the tokens of the file's post-processor.
            most: most tokens that the caller takes. A long text that must have more is refused before it is encoded.
            cut: return the last `most` tokens of a long text, instead of a refusal.

        Raises:
            InvalidInput: it is no text, has lone surrogates, or the tokenizer fails on it or meets a bound.
            RequestTooLong: a long text has more tokens than `most`, and is not cut.
            Overloaded: no process became free in time.
        """
        with tokenizer_failures("the tokenizer cannot encode the text"):
            if not isinstance(text, str) or len(text.encode(errors="replace")) * self._growth <= _MOST_HERE:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            kept = most if cut else None
            if most is not None and not cut:
                _check_length(text, self._sizes.fewest_tokens(text), most)
            needs = self._name, self.tokenizer.to_str
            found = array("I", _ENCODE.run(self._name, text, add_special_tokens, kept, needs=needs))
            if most is not None:
                _check_length(text, len(found), most)
            token_ids: list[int] = []
            for start in range(0, len(found), _MOST_HERE):
                # In pieces, between which other threads run.
                token_ids += found[start : start + _MOST_HERE]
            return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidInput: an id is no unsigned 32-bit number, or the tokenizer fails on them or meets a bound.
            Overloaded: no process became free in time.
        """
        ids = list(token_ids)
        with tokenizer_failures("the tokenizer cannot decode the token ids"):
            if len(ids) <= _MOST_HERE:
                return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            needs = self._name, self.tokenizer.to_str
            return _DECODE.run(self._name, ids, skip_special_tokens, needs=needs).decode()

    def decode_plainly(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the token ids, special ones included."""
        return self.decode(token_ids, skip_special_tokens=False)


def _check_length(text: str, num_tokens: int, most: int) -> None:
    """Refuses a text of at least `num_tokens` tokens if these are too many."""
    if num_tokens > most:
        raise RequestTooLong(
            f"the prompt has {len(text)} characters and at least {num_tokens} tokens; the longest prompt has {most}. "
            "Shorten it.",
            argument="prompt",
        )


def read_tokenizer(path: Path) -> TextTokenizer:
    """Reads tokenizer.json of a checked model folder, and its chat template; see `load_tokenizer`."""
    file = member(path, _NAME, max_bytes=_MAX_BYTES)
    if file is None:
        if member(path, "tokenizer.model") is not None:
            text = f"the folder has tokenizer.model but no {_NAME}; save it once with transformers' fast tokenizer."
            raise Unsupported(text)
        raise InvalidInput(
            f"the folder has no {_NAME}; load_model(folder, with_tokenizer=False) reads the model alone, which takes "
            "prompts of token ids."
        )
    text = read_text(file)
    with tokenizer_failures(f"{_NAME} is not a tokenizer that this version of tokenizers reads"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    try:
        check_growth(tokenizer)
    except InvalidInput as error:
        raise error.under(_NAME) from None
    templates = _chat_templates(path)
    return TextTokenizer(tokenizer, templates.get("default"), _special_tokens(path), templates.get("tool_use"))


def _chat_templates(folder: Path) -> dict[str, str]:
    """Returns the templates by name, of files of their own or, in older folders, of tokenizer_config.json."""
    files = {
        "default": member(folder, "chat_template.jinja", max_bytes=_MAX_TEMPLATE_BYTES),
        "tool_use": member(folder, TOOL_TEMPLATE, max_bytes=_MAX_TEMPLATE_BYTES, inside=MORE_TEMPLATES),
    }
    if files["default"] is not None:
        return {name: read_text(file) for name, file in files.items() if file is not None}
    if member(folder, _CONFIG) is None:
        return {}
    found = read_object(folder, _CONFIG).get("chat_template")
    named = {"default": found} if found is not None else {}
    if isinstance(found, list):
        listed = [each for each in found if isinstance(each, dict)]
        named = {each["name"]: each.get("template") for each in listed if isinstance(each.get("name"), str)}
    for name in ("default", "tool_use"):
        if not isinstance(named.get(name), str | None):
            wanted = "it must be a text, or a list with a default"
            raise InvalidInput("chat_template", value=named[name], wanted=wanted).under(_CONFIG)
    return {name: text for name, text in named.items() if text is not None}


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns the bos_token, eos_token and so on of tokenizer_config.json: a text, or an object with one."""
    described = {} if member(folder, _CONFIG) is None else read_object(folder, _CONFIG)
    named = {name: value for name, value in described.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


@contextlib.contextmanager
def tokenizer_failures(what: str) -> Iterator[None]:
    """Converts the library's exceptions to InvalidInput; it raises plain Exception for bad files."""
    try:
        yield
    except JattnError:
        raise
    except BaseException as error:
        # Where the library's Rust panics, pyo3 raises a class that cannot be imported and is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInput(f"{what}: {error}.") from None
