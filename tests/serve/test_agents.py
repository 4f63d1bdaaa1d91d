"""Clients of others against the server, where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from jattn.llm.load import embedded_model_folder
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


def test_llms_command_takes_tools(server, tmp_path) -> None:
    pytest.importorskip("llm")
    fields = {
        "model_id": "local",
        "model_name": MODEL,
        "api_base": f"{server.url}/v1",
        "supports_tools": True,
        "api_key_name": "local",
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([fields]))
    function = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return 'Sun'"
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "local",
        "--key",
        KEY,
        "--functions",
        function,
        "-o",
        "max_tokens",
        "8",
    ]

    # Plugins of the environment may need packages that are not there.
    env = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    found = subprocess.run([*command, "Rain?"], env=env, capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()


def test_lm_eval_asks_chats(server, tmp_path, monkeypatch) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator")
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data.json").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.json")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))

    found = evaluator.simple_evaluate(
        "local-chat-completions",
        model_args=f"model={MODEL},base_url={server.url}/v1/chat/completions,max_retries=1",
        tasks=["sums"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )

    assert found["results"]["sums"]["exact_match,none"] in (0, 1)


def test_openais_client_for_node(server) -> None:
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", "require('openai')"], capture_output=True, check=False).returncode:
        pytest.skip("node or its package openai is not there; NODE_PATH says where packages are")
    script = Path(__file__).with_name("agent.cjs")

    found = subprocess.run([node, script, server.url, MODEL, KEY], capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stderr


def test_guidellm_loads_the_server(server, tmp_path) -> None:
    command = shutil.which("guidellm", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("guidellm is not installed")
    (tmp_path / "prompts.json").write_text('{"prompt": "Rain?"}\n' * 4)
    shutil.copy(embedded_model_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    run = [
        *("--backend", f"kind=openai_http,target={server.url},model={MODEL},api_key=another"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=huggingface_auto,model={tmp_path}"),
        *("--data", f"kind=json_file,path={tmp_path}/prompts.json"),
        *("--output", f"kind=json,path={tmp_path}/report.json"),
    ]

    subprocess.run([command, "run", *run], capture_output=True, check=True)

    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4
