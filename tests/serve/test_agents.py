"""Clients of others against the server, where they are installed."""

from __future__ import annotations

import json
from typing import Any, Literal

import pydantic
import pytest

from tests.serve.conftest import KEY, MODEL
from tests.serve.test_tools import TOOLS, check, forced


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome"]


@pytest.fixture
def langchain(server) -> Any:
    library = pytest.importorskip("langchain_openai")
    return library.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model=MODEL, max_tokens=60, temperature=0, max_retries=0, timeout=300
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchains_structured_output(langchain, method) -> None:
    found = langchain.with_structured_output(Weather, method=method, include_raw=True).invoke("Rain?")

    if method == "json_mode":
        # Any object, which may be cut: the model knows nothing of the fields.
        assert found["raw"].content.startswith("{")
    else:
        assert isinstance(found["parsed"], Weather)


def test_langchains_loop_of_calls(langchain) -> None:
    messages: list[Any] = [("user", "Rain?")]
    for choice in ("any", "calendar"):
        asked = langchain.bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False)
        answer = asked.invoke(messages)
        (call,) = answer.tool_calls
        assert call["name"] in ("weather", "calendar")
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
    streamed = None
    for chunk in asked.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk

    assert streamed is not None
    assert [each["name"] for each in streamed.tool_calls] == ["calendar"]
    assert langchain.invoke(messages).content


@pytest.mark.filterwarnings("ignore")
def test_langgraphs_agent_runs_the_tool_that_is_called(langchain) -> None:
    agents = pytest.importorskip("langgraph.prebuilt")
    called = []

    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "Sun"

    text = '[{"name": "weather", "arguments": {"city": "Bern"}}]'
    first, then = (langchain.model_copy(update={"extra_body": forced(each)}) for each in (text, "It is sunny."))
    pick = lambda state, _: (then if called else first).bind_tools([weather])  # noqa: E731
    agent = agents.create_react_agent(pick, [weather])

    answer = agent.invoke({"messages": [("user", "Rain?")]})

    assert called == ["Bern"]
    assert answer["messages"][-1].content == "It is sunny."


def test_langchains_responses(server) -> None:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model=MODEL, max_tokens=40, temperature=0, use_responses_api=True
    )

    answer = model.invoke("Rain?")
    call = model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke("Rain?")

    assert answer.text
    assert len(call.tool_calls) == 1


def test_litellm(server) -> None:
    litellm = pytest.importorskip("litellm")
    ask: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "temperature": 0,
    }

    answer = litellm.completion(**ask)
    events = list(litellm.completion(stream=True, **ask))

    (call,) = answer.choices[0].message.tool_calls
    check(call)
    calls = [each for event in events for each in event.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(each.function.arguments for each in calls)) == json.loads(call.function.arguments)


def test_llm_takes_tools(server) -> None:
    library = pytest.importorskip("llm.default_plugins.openai_models")
    model = library.Chat("embedded", model_name=MODEL, api_base=f"{server.url}/v1", supports_tools=True)

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"Sun in {city}"

    response = model.prompt("Rain?", tools=[weather], key=KEY, max_tokens=8)

    # The client has no option that forces a call.
    assert response.text()
    assert response.tool_calls() == []
