"""OpenAI's HTTP interface over an AsyncLLM: routes, keys, limits, streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import jattn
from jattn.llm.engine import RequestOutput, SamplingParams
from jattn.llm.engine.options.params import cuts_prompt
from jattn.llm.load import ChatTemplate, TextTokenizer
from jattn.llm.serve.access import AccessLog
from jattn.llm.serve.async_llm import AsyncLLM, Submission
from jattn.llm.serve.bodies import DetokenizeBody, EmbeddingsBody, TokenizeBody, prompts_of, read_body
from jattn.llm.serve.connection import TimeLimits
from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.keys import KeyRing
from jattn.llm.serve.metrics import Metrics
from jattn.llm.serve.protocol import Generation, parse_body, parse_chat, parse_completion
from jattn.llm.serve.responses import Answer, Sample, embeddings_answer, error_body, event, json_bytes, usage
from jattn.llm.serve.responses_answer import ResponseAnswer
from jattn.llm.serve.responses_request import ResponsesBody, parse_response
from jattn.llm.serve.tools import note_silent_template, reading_of, with_instruction
from jattn.llm.serve.unread import UnreadBodies
from jattn.llm.text.embeddings import shortened
from jattn.llm.text.prompts import chat_prompt, encoded, template_of
from jattn.llm.tools.formats import REASONING_PARSERS, TOOL_PARSERS
from jattn.llm.tools.parser import Reading
from torch_core.base.checks import check_bool, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Choices, check_fields

_R = TypeVar("_R")
_log = logging.getLogger("jattn.llm.serve")

# OpenAI's limit.
_MAX_INPUTS = 2048
_MAX_THREADS = 128
# Token ids of one call of `/detokenize`, which holds Python's lock; a longer context raises it.
_MAX_DECODED = 1 << 17
# A longer body is parsed off the event loop.
_SHORT_BODY = 1 << 14
# The status that nginx logs for a client that disconnected.
_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The configuration of one server.

    Attributes:
        model_name: name of the model in clients' requests.
        api_keys: keys in the form of `KeyRing`; a client must send one of them as its bearer token. Empty for no check.
        isolate_tenants: requests share cached prefixes only with requests of the same tenant.
        max_body_bytes: largest body of a request, in bytes.
        max_unfinished: most samples that wait or run; beyond it the answer is 429.
        time_limits: seconds after which a slow client is dropped.
        chat_template: template instead of the model's.
        trust_request_chat_template: also accept a template from a request; it runs in the same sandbox.
        tool_call_parser: format of the calls in chats' answers, by its name in `jattn.llm.tools.formats`; "auto" for
            that of the chat template, "none" for plain text.
        reasoning_parser: format of the reasoning, likewise.
        tool_instruction: describe a request's tools in the system message if the chat template does not write them.
        matryoshka: the model was trained so that the first elements of a vector are one: serve `dimensions`.
        default_sampling: default values of requests' fields, by name.

    Raises:
        InvalidInput: a size is out of range, or there are tenants without keys.
    """

    model_name: str
    api_keys: Mapping[str, str] | Sequence[str] = ()
    isolate_tenants: bool = False
    max_body_bytes: int = 4 << 20
    max_unfinished: int = 1024
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    chat_template: ChatTemplate | str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: Annotated[str, Choices(*TOOL_PARSERS)] = "auto"
    reasoning_parser: Annotated[str, Choices(*REASONING_PARSERS)] = "auto"
    tool_instruction: bool = False
    matryoshka: bool = False
    default_sampling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_int("max_body_bytes", self.max_body_bytes, 1)
        check_int("max_unfinished", self.max_unfinished, 1)
        for name in ("isolate_tenants", "trust_request_chat_template", "tool_instruction", "matryoshka"):
            check_bool(name, getattr(self, name))
        check_fields(self)
        if self.isolate_tenants and not self.api_keys:
            raise InvalidInput("isolate_tenants is True and there are no api_keys, which say who a tenant is.")


def create_app(llm: AsyncLLM, config: ServeConfig) -> Starlette:
    """Returns the ASGI application; the AsyncLLM is closed when it shuts down."""
    server = _Server(llm, config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Requests whose texts wait for a process hold a thread each.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        yield
        await asyncio.to_thread(llm.close)

    routes = [
        Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/responses", server.guarded(server.responses), methods=["POST"]),
        Route("/v1/embeddings", server.guarded(server.embeddings), methods=["POST"]),
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
    def __init__(self, llm: AsyncLLM, config: ServeConfig) -> None:
        self._llm = llm
        self._config = config
        self._metrics = Metrics(llm)
        self._started = int(time.time())
        self._keys = KeyRing(config.api_keys)
        self._reads, self._embeds = asyncio.Lock(), asyncio.Lock()
        self._num_embedded, self._num_arriving = 0, 0

    def guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a route: checks the key, and converts every error to OpenAI's form."""

        async def handle_or_refuse(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                refusal = as_request_error(error)
                if refusal.status >= 500:
                    _log.exception("request %s failed", request.state.request_id)
                return self._refusal(refusal)

        return handle_or_refuse

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """Answers requests without a route."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self._refusal(RequestError(status, f"{request.method} {request.url.path} is not served."))

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, await self._read(request, parse_completion))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, await self._read(request, parse_chat))

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, *await self._read(request, parse_response))

    async def embeddings(self, request: Request) -> Response:
        asked = await self._read(request, lambda body, _: read_body(EmbeddingsBody, body))
        prompts = prompts_of("input", asked.input, _MAX_INPUTS)
        self._check_model(asked.model)
        if asked.dimensions is not None and not self._config.matryoshka:
            wanted = "vectors have the model's own size: leave it out, or start the server with --matryoshka"
            raise InvalidInput("dimensions", value=asked.dimensions, wanted=wanted)
        self._check_room("input", len(prompts), self._num_embedded)
        self._num_embedded += len(prompts)
        try:
            # One after the other: each fills the device by itself.
            async with self._embeds:
                found = await asyncio.to_thread(
                    self._llm.llm.embed, prompts, pooling=asked.pooling, normalize=asked.normalize
                )
        except Exception as error:
            raise as_request_error(error, default="input") from error
        finally:
            self._num_embedded -= len(prompts)
        num_tokens = sum(len(each.prompt_token_ids) for each in found)
        request.state.log["prompt_tokens"] = num_tokens
        vectors = [each.outputs.embedding for each in found]
        if asked.dimensions is not None:
            vectors = shortened(vectors, asked.dimensions, normalize=asked.normalize)
        is_base64 = asked.encoding_format == "base64"
        return await _written(embeddings_answer, vectors, self._config.model_name, num_tokens, as_base64=is_base64)

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "jattn",
            "max_model_len": self._llm.llm.max_model_len,
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self._check_model(name)
        return JSONResponse(model)

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(
            request, lambda body, _: parse_chat(body) if "messages" in body else read_body(TokenizeBody, body)
        )
        if isinstance(asked, Generation):
            self._check_model(asked.body.model)
            prompt = await asyncio.to_thread(self._chat_prompt, asked, tokenizes=True)
            token_ids, _ = encoded(prompt, self._llm.llm.tokenizer)
        else:
            self._check_model(asked.model)
            token_ids = await asyncio.to_thread(
                self._tokenizer().encode, asked.prompt, add_special_tokens=asked.add_special_tokens
            )
        length = self._llm.llm.max_model_len
        return await _written(dict, tokens=token_ids, count=len(token_ids), max_model_len=length)

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, lambda body, _: read_body(DetokenizeBody, body))
        self._check_model(asked.model)
        vocab_size, most = self._llm.llm.vocab_size, max(_MAX_DECODED, self._llm.llm.max_model_len)
        if len(asked.tokens) > most:
            raise InvalidInput("tokens", f"has {len(asked.tokens)} ids", f"it must have at most {most}")
        if (largest := max(asked.tokens, default=0)) >= vocab_size:
            raise InvalidInput("tokens", f"has {largest}, outside the vocabulary", f"ids are 0 to {vocab_size - 1}")
        try:
            # One after another, as long bodies.
            async with self._reads:
                text = await asyncio.to_thread(self._tokenizer().decode_plainly, asked.tokens)
            return JSONResponse({"prompt": text})
        except InvalidInput as error:
            raise as_request_error(error, default="tokens") from None

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": jattn.__version__})

    async def health(self, request: Request) -> Response:
        return self._state(is_fine=self._llm.is_running)

    async def ready(self, request: Request) -> Response:
        return self._state(is_fine=self._llm.is_ready)

    def _state(self, *, is_fine: bool) -> Response:
        state = "ready" if self._llm.is_ready else "warming" if self._llm.is_running else "closed"
        return JSONResponse({"status": state}, 200 if is_fine else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request, generation: Generation, form: ResponsesBody | None = None) -> Response:
        self._check_model(generation.body.model)
        if not self._llm.llm.generates:
            name = self._config.model_name
            raise InvalidInput("model", f"{name!r} is an encoder, which generates nothing", "ask /v1/embeddings")
        prompts = generation.prompts
        field = generation.prompt_field
        wanted = generation.params.n * max(len(prompts), 1)
        self._check_room("n" if generation.params.n > self._config.max_unfinished else field, wanted)
        # Requests that arrive before these are queued count them.
        self._num_arriving += wanted
        try:
            reading, params = None, generation.params
            if generation.messages is not None:
                prompts, reading, params = await asyncio.to_thread(self._chat, generation)
            options = {"priority": generation.body.priority, "inputs": generation.body.vllm_xargs}
            submission = await self._llm.submit(prompts, params, salt=self._salt(request, generation), **options)
        except Exception as error:
            raise as_request_error(
                error, default=field, grammar=generation.grammar_field, aliases=generation.aliases
            ) from error
        finally:
            self._num_arriving -= wanted
        prefix = "resp" if form is not None else "cmpl" if generation.messages is None else "chatcmpl"
        name, tokenizer = self._config.model_name, self._llm.llm.tokenizer
        answer: Answer | ResponseAnswer = Answer(
            generation,
            f"{prefix}{'-' if form is None else '_'}{uuid.uuid4().hex}",
            name,
            int(time.time()),
            tokenizer,
            reading,
        )
        if form is not None:
            answer = ResponseAnswer(answer, form)
        if generation.body.stream:
            events = self._events(request, answer, submission)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
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

    async def _events(
        self, request: Request, answer: Answer | ResponseAnswer, submission: Submission
    ) -> AsyncIterator[str]:
        # Starlette closes the iterator when the client is gone.
        with submission:
            try:
                outputs, samples = [], defaultdict[tuple[int, int], Sample](answer.sample)
                for body in answer.opening():
                    yield event(body)
                async for prompt, update in submission:
                    if update.new.text or update.new.logprobs or update.new.finish_reason is not None:
                        for body in answer.parts(prompt, update.new, samples[prompt, update.new.index]):
                            yield event(body)
                    if update.output is not None:
                        outputs.append(update.output)
                        self._metrics.finished(update.output)
                self._note_usage(request, outputs)
                for body in answer.closing(outputs):
                    yield event(body)
            except Exception as error:
                # The status is sent; all that is left is an event.
                yield event(answer.failure(as_request_error(error)))
            if answer.done is not None:
                yield event(answer.done)

    async def _read(self, request: Request, read: Callable[[dict[str, Any], Mapping[str, Any] | None], _R]) -> _R:
        """Returns what `read` makes of a request's JSON and the values of fields that it leaves out."""
        most, body = self._config.max_body_bytes, bytearray()
        problem = RequestError(413, f"the body is longer than {most} bytes.")
        given = request.headers.get("content-length", "")
        if given.isdecimal() and int(given) > most:
            raise problem
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise problem
        work = lambda: read(parse_body(bytes(body)), self._config.default_sampling)  # noqa: E731
        if len(body) <= _SHORT_BODY:
            return work()
        # One after another: the loop waits for Python's lock behind one of them, not behind all.
        async with self._reads:
            return await asyncio.to_thread(work)

    def _chat(self, generation: Generation) -> tuple[list[Any], Reading | None, SamplingParams]:
        """Returns the prompt of a chat, the reading of its answers, and its parameters."""
        prompt, tokenizer, given = self._chat_prompt(generation), self._llm.llm.tokenizer, generation.template or {}
        if tokenizer is None:
            return [prompt], None, generation.params
        own = generation.chat_template or self._config.chat_template
        template = template_of(tokenizer, own, with_tools=bool(given.get("tools"))).source
        reading, params = reading_of(
            generation.tools,
            generation.params,
            parsers=(self._config.tool_call_parser, self._config.reasoning_parser),
            template=template,
            prompt=prompt["prompt"],
            tokenizer=tokenizer,
            answer=generation.answer_schema,
        )
        return [prompt], reading, params

    def _chat_prompt(self, generation: Generation, *, tokenizes: bool = False) -> Any:
        own = generation.chat_template
        if own is not None and not self._config.trust_request_chat_template:
            raise InvalidInput("chat_template", "is given", "this server takes none from requests")
        template = self._config.chat_template if own is None else own
        messages, given = generation.messages or [], generation.template or {}
        try:
            if given.get("tools") and not self._writes_tools(template):
                if self._config.tool_instruction:
                    messages = with_instruction(messages, given["tools"])
                else:
                    note_silent_template()
            return chat_prompt(
                self._llm.llm.tokenizer,
                messages,
                chat_template=template,
                **given,
                most=None if tokenizes else self._llm.llm.longest_prompt,
                cut=not tokenizes and cuts_prompt(generation.params),
            )
        except InvalidInput as error:
            if own is None:
                raise
            raise RequestError(400, str(error.under("chat_template")), param="chat_template") from None

    def _writes_tools(self, template: ChatTemplate | str | None) -> bool:
        tokenizer = self._llm.llm.tokenizer
        return tokenizer is None or "tools" in template_of(tokenizer, template, with_tools=True).source

    def _check_room(self, param: str, wanted: int, num_unfinished: int | None = None) -> None:
        most = self._config.max_unfinished
        if num_unfinished is None:
            num_unfinished = self._llm.num_unfinished + self._num_arriving
        if wanted > most:
            raise InvalidInput(param, f"asks for {wanted} samples", f"this server takes {most} at once")
        if num_unfinished + wanted > most:
            raise RequestError(429, f"{num_unfinished} samples wait or run; try again soon.", code="overloaded")

    def _tokenizer(self) -> TextTokenizer:
        tokenizer = self._llm.llm.tokenizer
        if tokenizer is None:
            raise RequestError(400, "the model has no tokenizer.")
        return tokenizer

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
            tenant = self._keys.tenant(request.headers.get("authorization", ""))
            if tenant is None:
                raise RequestError(401, "the API key is missing or wrong.", code="invalid_api_key")
            request.state.tenant, name = tenant
            if name is not None:
                request.state.log["tenant"] = name

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._config.model_name:
            known = self._config.model_name
            problem = f"model {name[:80]!r} is not served; {known!r} is."
            raise RequestError(404, problem, param="model", code="model_not_found")

    def _refusal(self, error: RequestError) -> Response:
        self._metrics.refused(error.status)
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error_body(error), error.status, headers)


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
