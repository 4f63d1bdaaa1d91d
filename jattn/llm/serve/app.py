"""OpenAI's HTTP interface over an AsyncLLM: routes, keys, limits, streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import jattn
from jattn.llm.engine import RequestOutput
from jattn.llm.serve.access import AccessLog
from jattn.llm.serve.anthropic_answer import MessageAnswer, message_error
from jattn.llm.serve.anthropic_request import parse_messages
from jattn.llm.serve.async_llm import AsyncLLM, Submission
from jattn.llm.serve.bodies import (
    DetokenizeBody,
    EmbeddingsBody,
    LoadLoraBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    UnloadLoraBody,
    VectorsBody,
    read_body,
)
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.keys import KeyRing
from jattn.llm.serve.metrics import Metrics
from jattn.llm.serve.models import ModelList, ServedModel
from jattn.llm.serve.protocol import Generation, parse_body, parse_chat, parse_completion
from jattn.llm.serve.responses import Answer, Sample, error_body, event, json_bytes, usage
from jattn.llm.serve.responses_answer import ResponseAnswer
from jattn.llm.serve.responses_request import parse_response
from jattn.llm.serve.unread import UnreadBodies
from jattn.llm.serve.vectors import embeddings_answer, rerank_answer, score_answer
from jattn.llm.text.prompts import encoded
from torch_core.base.errors import InvalidInput

_Answer = Answer | ResponseAnswer | MessageAnswer
_ErrorForm = Callable[[RequestError], dict[str, Any]]
_R = TypeVar("_R")
_V = TypeVar("_V", bound=VectorsBody)
_log = logging.getLogger("jattn.llm.serve")

_MAX_THREADS = 128
# Token ids of one call of `/detokenize`, which holds Python's lock; a longer context raises it.
_MAX_DECODED = 1 << 17
# A longer body is parsed off the event loop.
_SHORT_BODY = 1 << 14
# The status that nginx logs for a client that disconnected.
_CLIENT_GONE = 499


def create_app(llm: AsyncLLM, config: ServeConfig, more: Mapping[str, AsyncLLM] | None = None) -> Starlette:
    """Returns the ASGI application; every AsyncLLM is closed when it shuts down.

    Args:
        llm: runs the requests for `config.model_name`, and those that name no model.
        config: config of the server.
        more: further models by name.
    """
    models = ModelList({config.model_name: llm, **(more or {})}, config)
    server = _Server(models, config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Requests whose texts wait for a process hold a thread each.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        yield
        await asyncio.to_thread(models.close)

    routes = [
        Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/messages", server.guarded(server.messages, message_error), methods=["POST"]),
        Route("/v1/messages/count_tokens", server.guarded(server.count_tokens, message_error), methods=["POST"]),
        Route("/v1/responses", server.guarded(server.responses), methods=["POST"]),
        Route("/v1/embeddings", server.guarded(server.embeddings), methods=["POST"]),
        *(Route(path, server.guarded(server.scores), methods=["POST"]) for path in ("/v1/score", "/score")),
        *(
            Route(path, server.guarded(server.reranked), methods=["POST"])
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        ),
        Route("/v1/load_lora_adapter", server.guarded(server.load_lora), methods=["POST"]),
        Route("/v1/unload_lora_adapter", server.guarded(server.unload_lora), methods=["POST"]),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{name:path}", server.guarded(server.models)),
        Route("/tokenize", server.guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", server.guarded(server.detokenize), methods=["POST"]),
        Route("/version", server.version),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/metrics", server.show_metrics),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(AccessLog), Middleware(UnreadBodies, most_bytes=config.max_body_bytes)],
        exception_handlers={HTTPException: server.refuse_route},
    )
    # A redirect would lead to the host that the client names.
    app.router.redirect_slashes = False
    return app


class _Server:
    def __init__(self, models: ModelList, config: ServeConfig) -> None:
        self._models = models
        self._config = config
        self._metrics = Metrics(models)
        self._started = int(time.time())
        self._keys = KeyRing(config.api_keys)
        self._reads, self._embeds = asyncio.Lock(), asyncio.Lock()
        self._num_embedded = 0

    def guarded(
        self, handle: Callable[[Request], Awaitable[Response]], form: _ErrorForm = error_body
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a route: checks the key, and converts every error to a form, OpenAI's by default."""

        async def handle_or_refuse(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                return self._refusal(_told(request, error), form)

        return handle_or_refuse

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """Answers requests without a route."""
        found = error if isinstance(error, HTTPException) else HTTPException(500)
        response = self._refusal(RequestError(found.status_code, f"{request.method} {request.url.path} is not served."))
        # The methods of the path, with 405.
        response.headers.update(found.headers or {})
        return response

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, *await self._read(request, parse_completion))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, *await self._read(request, parse_chat))

    async def responses(self, request: Request) -> Response:
        model, (generation, body) = await self._read(request, parse_response)
        return await self._generate(request, model, generation, lambda chat: ResponseAnswer(chat, body))

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, *await self._read(request, parse_messages), MessageAnswer)

    async def count_tokens(self, request: Request) -> Response:
        model, asked = await self._read(request, lambda body, _: parse_messages({"max_tokens": 1, **body}))
        return JSONResponse({"input_tokens": len(await self._chat_tokens(model, asked))})

    async def _chat_tokens(self, model: ServedModel, asked: Generation) -> Sequence[int]:
        prompt = await asyncio.to_thread(model.chat_prompt, asked, tokenizes=True)
        return encoded(prompt, model.llm.llm.tokenizer)[0]

    async def embeddings(self, request: Request) -> Response:
        return await self._vectors(request, EmbeddingsBody, embeddings_answer)

    async def scores(self, request: Request) -> Response:
        return await self._vectors(request, ScoreBody, score_answer)

    async def reranked(self, request: Request) -> Response:
        return await self._vectors(request, RerankBody, rerank_answer)

    async def _vectors(
        self, request: Request, kind: type[_V], answer: Callable[[ServedModel, _V, ServeConfig], dict[str, Any]]
    ) -> Response:
        """Answers a request for vectors, or for scores, off the event loop."""
        model, asked = await self._read(request, lambda body, _: read_body(kind, body))
        model.check_is_base()
        self._check_room(asked.texts_field, asked.num_texts, self._num_embedded)
        self._num_embedded += asked.num_texts
        try:
            # One after the other: each fills the device by itself.
            async with self._embeds:
                if await request.is_disconnected():
                    return Response(status_code=_CLIENT_GONE)
                found = await asyncio.to_thread(answer, model, asked, self._config)
        except Exception as error:
            raise as_request_error(error, default=asked.texts_field) from error
        finally:
            self._num_embedded -= asked.num_texts
        request.state.log["prompt_tokens"] = found["usage"]["prompt_tokens"]
        return await _written(dict, found)

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None:
            return JSONResponse(self._card(self._models.find(name)))
        return JSONResponse({"object": "list", "data": [self._card(model) for model in self._models.listed()]})

    def _card(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "jattn",
            "max_model_len": model.max_model_len,
            **({} if model.parent is None else {"parent": model.parent}),
        }

    async def load_lora(self, request: Request) -> Response:
        _, asked = await self._read(request, lambda body, _: read_body(LoadLoraBody, body))
        return Response(await asyncio.to_thread(self._models.load_adapter, asked), media_type="text/plain")

    async def unload_lora(self, request: Request) -> Response:
        _, asked = await self._read(request, lambda body, _: read_body(UnloadLoraBody, body))
        return Response(await asyncio.to_thread(self._models.unload_adapter, asked), media_type="text/plain")

    async def tokenize(self, request: Request) -> Response:
        model, asked = await self._read(
            request, lambda body, _: parse_chat(body) if "messages" in body else read_body(TokenizeBody, body)
        )
        if isinstance(asked, Generation):
            token_ids = await self._chat_tokens(model, asked)
        else:
            token_ids = await asyncio.to_thread(
                model.tokenizer.encode, asked.prompt, add_special_tokens=asked.add_special_tokens
            )
        return await _written(dict, tokens=token_ids, count=len(token_ids), max_model_len=model.max_model_len)

    async def detokenize(self, request: Request) -> Response:
        model, asked = await self._read(request, lambda body, _: read_body(DetokenizeBody, body))
        vocab_size, most = model.llm.llm.vocab_size, max(_MAX_DECODED, model.max_model_len)
        if len(asked.tokens) > most:
            raise InvalidInput("tokens", f"has {len(asked.tokens)} ids", f"it must have at most {most}")
        if (largest := max(asked.tokens, default=0)) >= vocab_size:
            raise InvalidInput("tokens", f"has {largest}, outside the vocabulary", f"ids are 0 to {vocab_size - 1}")
        try:
            # One after another, as long bodies.
            async with self._reads:
                text = await asyncio.to_thread(model.tokenizer.decode_plainly, asked.tokens)
            return JSONResponse({"prompt": text})
        except InvalidInput as error:
            raise as_request_error(error, default="tokens") from None

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": jattn.__version__})

    async def health(self, request: Request) -> Response:
        return self._state(is_fine=self._models.is_running)

    async def ready(self, request: Request) -> Response:
        return self._state(is_fine=self._models.is_ready)

    def _state(self, *, is_fine: bool) -> Response:
        state = "ready" if self._models.is_ready else "warming" if self._models.is_running else "closed"
        return JSONResponse({"status": state}, 200 if is_fine else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type="text/plain; version=0.0.4")

    async def _generate(
        self,
        request: Request,
        model: ServedModel,
        generation: Generation,
        form: Callable[[Answer], _Answer] = lambda answer: answer,
    ) -> Response:
        model.check_generates()
        prompts = generation.prompts
        field = generation.prompt_field
        wanted = generation.params.n * max(len(prompts), 1)
        limited = "n" if generation.params.n > self._config.max_unfinished else field
        self._check_room(limited, wanted, self._models.num_unfinished)
        try:
            # Requests that arrive before these are queued count them.
            with model.llm.reserve(wanted) as reservation:
                reading, params = None, generation.params
                if generation.messages is not None:
                    prompts, reading, params = await asyncio.to_thread(model.chat, generation)
                options = {"priority": generation.body.priority, "inputs": generation.body.vllm_xargs}
                options |= {"lora": model.adapter, "salt": self._salt(request, generation)}
                submission = await model.llm.submit(prompts, params, reservation=reservation, **options)
        except Exception as error:
            # 404 if it is an adapter that was unloaded meanwhile.
            self._models.find(model.name)
            raise as_request_error(
                error, default=field, grammar=generation.grammar_field, aliases=generation.aliases
            ) from error
        tokenizer, counts = model.llm.llm.tokenizer, submission.num_prompt_tokens
        answer = form(Answer(generation, uuid.uuid4().hex, model.name, int(time.time()), tokenizer, reading, counts))
        if generation.body.stream:
            return _EventStream(self._events(request, answer, submission), submission)
        with submission:
            outputs = await _unless_gone(request, self._outputs(submission))
        self._note_usage(request, outputs)
        return await _written(answer.whole, outputs)

    async def _outputs(self, submission: Submission) -> list[RequestOutput]:
        finished = {}
        async for prompt, update in submission:
            if update.output is not None:
                finished[prompt] = update.output
                self._metrics.finished(update.output)
        return [finished[prompt] for prompt in sorted(finished)]

    async def _events(self, request: Request, answer: _Answer, submission: Submission) -> AsyncIterator[str]:
        try:
            outputs, samples = [], defaultdict[tuple[int, int], Sample](answer.sample)
            for body in answer.opening():
                yield event(body)
            async for prompt, new, output in submission.joined():
                if new.text or new.logprobs or new.finish_reason is not None:
                    for body in answer.parts(prompt, new, samples[prompt, new.index]):
                        yield event(body)
                if output is not None:
                    outputs.append(output)
                    self._metrics.finished(output)
            self._note_usage(request, outputs)
            for body in answer.closing(outputs):
                yield event(body)
        except Exception as error:
            # The status is sent; all that is left is an event.
            told = _told(request, error)
            self._metrics.refused(told.status)
            yield event(answer.failure(told))
        if answer.done is not None:
            yield event(answer.done)

    async def _read(
        self, request: Request, read: Callable[[dict[str, Any], Mapping[str, Any] | None], _R]
    ) -> tuple[ServedModel, _R]:
        """Returns a request's model, and what `read` makes of its JSON and the values of fields that it leaves out."""
        most, body = self._config.max_body_bytes, bytearray()
        problem = RequestError(413, f"the body is longer than {most} bytes.")
        given = request.headers.get("content-length", "")
        if given.isdecimal() and int(given) > most:
            raise problem
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise problem

        def work() -> tuple[ServedModel, _R]:
            given = parse_body(bytes(body))
            # A name of another type is refused with the other fields.
            name = given.get("model")
            model = self._models.find(name if isinstance(name, str) else None)
            return model, read(given, model.default_sampling)

        if len(body) <= _SHORT_BODY:
            return work()
        # One after another: the loop waits for Python's lock behind one of them, not behind all.
        async with self._reads:
            return await asyncio.to_thread(work)

    def _check_room(self, param: str, wanted: int, num_unfinished: int) -> None:
        most = self._config.max_unfinished
        if wanted > most:
            raise InvalidInput(param, f"asks for {wanted} samples", f"this server takes {most} at once")
        if num_unfinished + wanted > most:
            raise RequestError(429, f"{num_unfinished} samples wait or run; try again soon.", code="overloaded")

    def _salt(self, request: Request, generation: Generation) -> bytes | None:
        if not self._config.isolate_tenants:
            return generation.salt
        # Both are digests, so that no tenant's salt is another one's beginning.
        return hashlib.sha256(request.state.tenant + (generation.salt or b"")).digest()

    def _note_usage(self, request: Request, outputs: Sequence[RequestOutput]) -> None:
        counts = usage(outputs)
        request.state.log |= {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}

    def _check_key(self, request: Request) -> None:
        if self._keys:
            # Clients of /v1/messages have a header of their own.
            given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
            tenant = self._keys.tenant(given)
            if tenant is None:
                raise RequestError(401, "the API key is missing or wrong.", code="invalid_api_key")
            request.state.tenant, name = tenant
            if name is not None:
                request.state.log["tenant"] = name

    def _refusal(self, error: RequestError, form: _ErrorForm = error_body) -> Response:
        self._metrics.refused(error.status)
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        # In ASCII: the name of a client's field may have half a character, which UTF-8 cannot write.
        return Response(json.dumps(form(error)), error.status, headers, media_type="application/json")


class _EventStream(StreamingResponse):
    """The events of some requests, which are cancelled at its end, even if the client is gone before the first."""

    def __init__(self, events: AsyncIterator[str], submission: Submission) -> None:
        # The second one is nginx's: the proxy passes each event on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._submission = submission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Between two events the connection may write a comment.
        scope["state"]["is_event_stream"] = True
        with self._submission:
            await super().__call__(scope, receive, send)


def _told(request: Request, error: Exception) -> RequestError:
    """Returns an exception as a client is told; the server's own is logged."""
    told = as_request_error(error)
    if told.code == "internal_error":
        _log.error("request %s failed", request.state.request_id, exc_info=error)
    return told


async def _written(make: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> Response:
    """Returns the answer whose JSON `make` makes, both off the event loop: vectors and log-probabilities are long."""
    content = await asyncio.to_thread(lambda: json_bytes(make(*args, **options)))
    return Response(content, media_type="application/json")


async def _unless_gone(request: Request, work: Any) -> Any:
    """Awaits work, and drops it when the client disconnects."""

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
