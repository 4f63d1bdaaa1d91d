"""The fields of a request's body, taken one by one; every refusal names its field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_core.base.checks import shown
from torch_core.base.errors import ArgumentError, RequestTooLong

__all__ = ["IGNORED", "SAMPLING", "Fields", "RequestError", "as_request_error", "is_prompt", "is_tokens"]

#: Fields that are SamplingParams' own, by name and meaning.
SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "logits_processors"),
)
#: Fields of clients that do not change the answer.
IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")


class RequestError(Exception):
    """A refusal over HTTP.

    Attributes:
        status: of the response.
        param: the field that is wrong; None if none is.
        code: for programs; None if the status says it all.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def as_request_error(
    error: Exception,
    *,
    default: str | None = None,
    grammar: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> RequestError:
    """Returns the refusal for an error of ours; the field is the error's argument.

    Args:
        error: any exception; a fault of the server becomes a 500 without internal details.
        default: the field if the error has no argument, and the client's name for `prompt`.
        grammar: the field that has the structured output.
        aliases: our names to the client's, if he wrote another one.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, ArgumentError):
        return RequestError(500, "the server failed on this request.", code="internal_error")
    is_of_prompt, is_long = error.root in (None, "prompt", "prompts"), isinstance(error, RequestTooLong)
    names = {"structured_outputs": grammar, **(aliases or {})}
    param = default if is_of_prompt else names.get(error.root or "") or error.root
    # The text has the engine's name, or none.
    if param is not None and (is_long if is_of_prompt else param != error.root):
        error = error.under(param)
    return RequestError(400, str(error), param=param, code="context_length_exceeded" if is_long else None)


class Fields:
    """The fields of a body, taken out one by one; the fields that remain are unknown.

    Args:
        body: of the request; a field that is null is as one that is missing.
        defaults: fields that hold if the body does not have them.
    """

    def __init__(self, body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        self._left = {**(defaults or {}), **given}

    def take(self, name: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """Returns a field, None if it is missing or null.

        Raises:
            RequestError: it does not fit.
        """
        value = self._left.pop(name, None)
        if value is not None and not fits(value):
            raise RequestError(400, f"{name} is {shown(value)}; it must be {wanted}.", param=name)
        return value

    def number(self, name: str, default: int | None) -> int | None:
        """Returns a whole number."""
        value = self.take(name, lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number")
        return default if value is None else value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns true or false."""
        value = self.take(name, lambda value: isinstance(value, bool), "true or false")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """Returns a string."""
        return self.take(name, lambda value: isinstance(value, str), "a string")

    def object(self, name: str) -> dict[str, Any] | None:
        """Returns a JSON object."""
        return self.take(name, lambda value: isinstance(value, dict), "an object")

    def finish(self) -> None:
        """Refuses the fields that remain."""
        for name in self._left:
            raise RequestError(400, f"{shown(name)} is no field of this request.", param=name)


def is_tokens(value: Any) -> bool:
    """Returns whether it is a list of whole numbers."""
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def is_prompt(value: Any) -> bool:
    """Returns whether it is a text, token ids, or a list of either that is not empty."""
    if isinstance(value, str):
        return True
    return bool(isinstance(value, list) and value) and (
        is_tokens(value) or all(isinstance(each, str) or (is_tokens(each) and bool(each)) for each in value)
    )
