"""The configuration of one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from jattn.llm.load import ChatTemplate
from jattn.llm.serve.connection import TimeLimits
from jattn.llm.tools.formats import REASONING_PARSERS, TOOL_PARSERS
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Choices, Limits, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The configuration of one server.

    Attributes:
        model_name: name of the model in clients' requests; of the first one if there are several.
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
        allow_runtime_lora_updating: requests may load adapters from folders of the server, and unload them.

    Raises:
        InvalidInput: a size is out of range, or there are tenants without keys.
    """

    model_name: str
    api_keys: Mapping[str, str] | Sequence[str] = ()
    isolate_tenants: bool = False
    max_body_bytes: Annotated[int, Limits(1)] = 4 << 20
    max_unfinished: Annotated[int, Limits(1)] = 1024
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    chat_template: ChatTemplate | str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: Annotated[str, Choices(*TOOL_PARSERS)] = "auto"
    reasoning_parser: Annotated[str, Choices(*REASONING_PARSERS)] = "auto"
    tool_instruction: bool = False
    matryoshka: bool = False
    allow_runtime_lora_updating: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.isolate_tenants and not self.api_keys:
            raise InvalidInput("isolate_tenants is True and there are no api_keys, which say who a tenant is.")
