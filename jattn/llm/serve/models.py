"""The models of a server: the only place where the name in a request finds its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jattn.llm.engine import LoRARequest, SamplingParams
from jattn.llm.engine.options.params import cuts_prompt
from jattn.llm.load import ChatTemplate, TextTokenizer
from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.serve.bodies import LoadLoraBody, UnloadLoraBody
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.protocol import Generation
from jattn.llm.serve.tools import note_silent_template, reading_of, with_instruction
from jattn.llm.text.prompts import chat_prompt, template_of
from jattn.llm.tools.parser import Reading
from torch_core.base.errors import InvalidInput


class ServedModel:
    """One model under the name that requests give.

    Args:
        name: name of the model.
        llm: runs its requests.
        config: config of the server.
        parent: name of the base model, if this one is an adapter over it.

    Attributes:
        adapter: name of the adapter; None for a base model.
    """

    def __init__(self, name: str, llm: AsyncLLM, config: ServeConfig, parent: str | None = None) -> None:
        self.name, self.llm, self._config, self.parent = name, llm, config, parent
        self.adapter = None if parent is None else name

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence at most."""
        return self.llm.llm.max_model_len

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Values of fields that requests leave out."""
        return self.llm.llm.default_sampling

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer; a request that needs one is refused without."""
        tokenizer = self.llm.llm.tokenizer
        if tokenizer is None:
            raise RequestError(400, "the model has no tokenizer.")
        return tokenizer

    def check_generates(self) -> None:
        """Refuses an encoder."""
        if not self.llm.llm.generates:
            wanted = "ask /v1/embeddings or /v1/score"
            raise InvalidInput("model", f"{self.name!r} is an encoder, which generates nothing", wanted)

    def check_is_base(self) -> None:
        """Refuses an adapter, for vectors."""
        if self.adapter is not None:
            raise InvalidInput("model", f"{self.name!r} is an adapter", f"vectors are of its base, {self.parent!r}")

    def adapters(self) -> list[ServedModel]:
        """Returns the adapters over this model."""
        loaded = self.llm.llm.engine.list_loras() if self.llm.llm.generates else {}
        bases = {name: request.base_model_name or self.name for name, request in loaded.items()}
        return [ServedModel(name, self.llm, self._config, base) for name, base in bases.items()]

    def chat(self, generation: Generation) -> tuple[list[Any], Reading | None, SamplingParams]:
        """Returns the prompt of a chat, the reading of its answers, and its parameters."""
        prompt, tokenizer, given = self.chat_prompt(generation), self.llm.llm.tokenizer, generation.template or {}
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

    def chat_prompt(self, generation: Generation, *, tokenizes: bool = False) -> Any:
        """Returns the prompt of a chat; of any length if it is only tokenised."""
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
                self.llm.llm.tokenizer,
                messages,
                chat_template=template,
                **given,
                most=None if tokenizes else self.llm.llm.longest_prompt,
                cut=not tokenizes and cuts_prompt(generation.params),
            )
        except InvalidInput as error:
            if own is None:
                raise
            raise RequestError(400, str(error.under("chat_template")), param="chat_template") from None

    def _writes_tools(self, template: ChatTemplate | str | None) -> bool:
        tokenizer = self.llm.llm.tokenizer
        return tokenizer is None or "tools" in template_of(tokenizer, template, with_tools=True).source


class ModelList:
    """The models of a server by name; the first one answers requests that name none.

    Args:
        llms: for each name, what runs its requests.
        config: config of the server.

    Raises:
        InvalidInput: there is no model.
    """

    def __init__(self, llms: Mapping[str, AsyncLLM], config: ServeConfig) -> None:
        if not llms:
            raise InvalidInput("models", "is empty", "a server has at least one")
        self._models = {name: ServedModel(name, llm, config) for name, llm in llms.items()}
        self._may_load = config.allow_runtime_lora_updating

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """Returns the model that a request names.

        Raises:
            RequestError: 404, there is none.
        """
        if name is None:
            return next(iter(self))
        known = {model.name: model for model in self.listed()}
        if name not in known:
            names = ", ".join(repr(each) for each in known)
            problem = f"model {name[:80]!r} is not served; {names} {'is' if len(known) == 1 else 'are'}."
            raise RequestError(404, problem, param="model", code="model_not_found")
        return known[name]

    def listed(self) -> list[ServedModel]:
        """Returns the models, and the adapters over each."""
        return [each for model in self for each in (model, *model.adapters())]

    def load_adapter(self, asked: LoadLoraBody) -> str:
        """Loads an adapter of the body's model from a folder of the server; returns a sentence that says so.

        Raises:
            RequestError: requests may not load any, there is no such model, or the folder does not fit.
            InvalidInput: the name is missing, or another model's.
            Unsupported: as `Engine.add_lora`.
        """
        model, name = self._open_to_loading(asked.model), _given("lora_name", asked.lora_name)
        if any(each.name == name and each.llm is not model.llm for each in self.listed()) or name in self._models:
            raise InvalidInput("lora_name", f"{name!r} is another model's name", "names differ")
        request = LoRARequest(name, 0, _given("lora_path", asked.lora_path), load_inplace=asked.load_inplace)
        try:
            model.llm.llm.engine.add_lora(request)
        except InvalidInput as error:
            raise as_request_error(error.renamed("lora_path", old="folder"), default="lora_path") from None
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload_adapter(self, asked: UnloadLoraBody) -> str:
        """Forgets an adapter; returns a sentence that says so.

        Raises:
            RequestError: 404, requests may not unload any, or there is none of the name.
            InvalidInput: the name is missing, or a base model's.
        """
        self._open_to_loading(asked.model)
        name = _given("lora_name", asked.lora_name)
        model = self.find(name)
        if model.adapter is None:
            raise InvalidInput("lora_name", f"{name!r} is no adapter's name")
        try:
            model.llm.llm.engine.remove_lora(name)
        except InvalidInput:
            # 404 if another request unloaded it meanwhile.
            self.find(name)
            raise
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _open_to_loading(self, name: str | None) -> ServedModel:
        if not self._may_load:
            raise RequestError(404, "this server loads no adapters; start it with --allow-runtime-lora-updating.")
        return self.find(name)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished samples of all models; see `AsyncLLM.num_unfinished`."""
        return sum(model.llm.num_unfinished for model in self)

    @property
    def is_running(self) -> bool:
        """Whether all take requests."""
        return all(model.llm.is_running for model in self)

    @property
    def is_ready(self) -> bool:
        """Whether none has requests that wait for programs that others need."""
        return all(model.llm.is_ready for model in self)

    def close(self) -> None:
        """Closes all."""
        for model in self:
            model.llm.close()


def _given(name: str, value: str | None) -> str:
    if not value:
        raise InvalidInput(name, "is missing", "it must be a string")
    return value
