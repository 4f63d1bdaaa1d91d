"""OpenAI's HTTP interface over an AsyncLLM: routes, keys, limits, streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jattn.engine import RequestOutput
from jattn.engine.prompts import chat_prompt, encoded
from jattn.load import ChatTemplate
from jattn.serve.async_llm import AsyncLLM, Submission
from jattn.serve.metrics import Metrics
from jattn.serve.protocol import Generation, RequestError, as_request_error, parse_body, parse_chat, parse_completion
from jattn.serve.responses import Answer, error_body, event
from torch_core.checks import check_int

__all__ = ["ServeConfig", "create_app"]

# What nginx answers, in its log, to a client that is gone.
_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Of one server.

    Attributes:
        model_name: that clients ask for.
        api_keys: one of which a client must bring as its bearer token; none for no check.
        max_body_bytes: of a request.
        max_unfinished: samples that may wait or run; beyond it the answer is 429.
        chat_template: instead of the model's.
        default_sampling: fields of requests that do not bring them, by name.

    Raises:
        InvalidInput: a size out of range.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_unfinished: int = 1024
    chat_template: ChatTemplate | str | None = None
    default_sampling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_int("max_body_bytes", self.max_body_bytes, 1)
        check_int("max_unfinished", self.max_unfinished, 1)


def create_app(llm: AsyncLLM, config: ServeConfig) -> Starlette:
    """Returns the ASGI application; the AsyncLLM is closed when it shuts down."""
    server = _Server(llm, config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(llm.close)

    routes = [
        Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{name:path}", server.guarded(server.models)),
        Route("/tokenize", server.guarded(server.tokenize), methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.show_metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: server.refuse_route})


class _Server:
    def __init__(self, llm: AsyncLLM, config: ServeConfig) -> None:
        self._llm = llm
        self._config = config
        self._metrics = Metrics(llm)
        self._started = int(time.time())
        self._keys = [_digest(key) for key in config.api_keys]

    def guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a route: the key is checked, and every error becomes OpenAI's."""

        async def handle_or_refuse(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                return self._refusal(as_request_error(error))

        return handle_or_refuse

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """Answers what no route takes."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self._refusal(RequestError(status, f"{request.method} {request.url.path} is not served."))

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion(await self._body(request), self._config.default_sampling))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse_chat(await self._body(request), self._config.default_sampling))

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "jattn",
            "max_model_len": self._llm.llm.engine.max_model_len,
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self._check_model(name)
        return JSONResponse(model)

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        if "messages" in body:
            prompt = await asyncio.to_thread(self._chat_prompt, parse_chat(body))
        else:
            (prompt,) = parse_completion({"model": body.get("model"), "prompt": body.get("prompt")}).prompts[:1]
        token_ids, _ = encoded(prompt, self._llm.llm.tokenizer)
        length = self._llm.llm.engine.max_model_len
        return JSONResponse({"tokens": list(token_ids), "count": len(token_ids), "max_model_len": length})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._llm.is_running else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request, generation: Generation) -> Response:
        self._check_model(generation.model)
        prompts = generation.prompts
        field = "prompt" if generation.messages is None else "messages"
        wanted = generation.params.n * max(len(prompts), 1)
        if self._llm.num_unfinished + wanted > self._config.max_unfinished:
            raise RequestError(
                429, f"{self._llm.num_unfinished} samples wait or run; try again soon.", code="overloaded"
            )
        try:
            if generation.messages is not None:
                prompts = [await asyncio.to_thread(self._chat_prompt, generation)]
            submission = await self._llm.submit(
                prompts, generation.params, salt=generation.salt, priority=generation.priority
            )
        except Exception as error:
            raise as_request_error(error, default=field) from None
        prefix = "cmpl" if generation.messages is None else "chatcmpl"
        answer = Answer(generation, f"{prefix}-{uuid.uuid4().hex}", self._config.model_name, int(time.time()))
        if generation.stream:
            events = self._events(answer, submission)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        with submission:
            outputs = await _unless_gone(request, self._outputs(submission))
        return JSONResponse(answer.whole(outputs))

    async def _outputs(self, submission: Submission) -> list[RequestOutput]:
        finished = {}
        async for prompt, update in submission:
            if update.output is not None:
                finished[prompt] = update.output
                self._metrics.finished(update.output)
        return [finished[prompt] for prompt in sorted(finished)]

    async def _events(self, answer: Answer, submission: Submission) -> AsyncIterator[str]:
        # Starlette closes the iterator when the client is gone.
        with submission:
            try:
                outputs = []
                for body in answer.opening():
                    yield event(body)
                async for prompt, update in submission:
                    if update.new.text or update.new.logprobs or update.new.finish_reason is not None:
                        yield event(answer.part(prompt, update.new))
                    if update.output is not None:
                        outputs.append(update.output)
                        self._metrics.finished(update.output)
                for body in answer.closing(outputs):
                    yield event(body)
            except Exception as error:
                # The status is sent; all that is left is an event.
                yield event(error_body(as_request_error(error)))
            yield event("[DONE]")

    async def _body(self, request: Request) -> dict[str, Any]:
        most = self._config.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise RequestError(413, f"the body is longer than {most} bytes.")
        return parse_body(bytes(body))

    def _chat_prompt(self, generation: Generation) -> Any:
        return chat_prompt(
            self._llm.llm.tokenizer,
            generation.messages or [],
            chat_template=self._config.chat_template,
            **(generation.template or {}),
        )

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time.
        found = [hmac.compare_digest(_digest(key), known) for known in self._keys]
        if self._keys and not (scheme.lower() == "bearer" and any(found)):
            raise RequestError(401, "the API key is missing or wrong.", code="invalid_api_key")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._config.model_name:
            known = self._config.model_name
            raise RequestError(
                404, f"model {name[:80]!r} is not served; {known!r} is.", param="model", code="model_not_found"
            )

    def _refusal(self, error: RequestError) -> Response:
        self._metrics.refused(error.status)
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error_body(error), error.status, headers)


async def _unless_gone(request: Request, work: Any) -> Any:
    """Awaits work, and drops it when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
