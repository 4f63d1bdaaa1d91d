"""Errors over HTTP: the error's argument is the field of the request."""

from __future__ import annotations

from collections.abc import Mapping

from torch_core.base.errors import ArgumentError, EngineClosed, Overloaded, PoolLost, RequestTooLong


class RequestError(Exception):
    """An error response.

    Attributes:
        status: the HTTP status.
        param: the field that is wrong; None if none is.
        code: an error code for programs; None if the status says all.
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
    """Returns the error response to an exception; one without details unless the client caused it.

    Args:
        error: any exception.
        default: the field for an error without an argument, and for one of the prompt.
        grammar: the field that holds the structured output.
        aliases: arguments to the fields that the client gave in their place.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Overloaded):
        return RequestError(429, str(error), code="overloaded")
    if isinstance(error, EngineClosed):
        # Clients send it again, and a balancer to another engine.
        return RequestError(503, str(error), code="unavailable")
    if not isinstance(error, ArgumentError):
        # An engine that lost its pool goes on with another.
        status = 503 if isinstance(error, PoolLost) else 500
        return RequestError(status, "the server failed on this request.", code="internal_error")
    is_of_prompt, is_long = error.root in (None, "prompt", "prompts"), isinstance(error, RequestTooLong)
    names = {"structured_outputs": grammar, "inputs": "vllm_xargs", **(aliases or {})}
    param = (default if is_of_prompt else names.get(error.root or "")) or error.root
    # The message has the engine's name of the argument, or none.
    if param is not None and (is_long if is_of_prompt else param != error.root):
        error = error.under(param)
    return RequestError(400, str(error), param=param, code="context_length_exceeded" if is_long else None)
