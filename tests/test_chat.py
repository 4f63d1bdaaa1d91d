"""A conversation in a terminal: what is answered to what, and how it ends."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from jattn import LLM, EngineConfig, SamplingParams, cli
from jattn.llm.chat import converse
from torch_core.base.errors import RequestTooLong

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=EngineConfig(max_num_seqs=1)) as llm:
        yield llm


def test_an_answer_is_given_in_the_light_of_what_was_said(llm) -> None:
    pieces: list[str] = []
    said = converse(
        llm, ["a list\n", "\n", "a tuple"], pieces.append, params=PARAMS, system="x", chat_template=TEMPLATE
    )

    assert [message["role"] for message in said] == ["system", "user", "assistant", "user", "assistant"]
    for place in (2, 4):
        (expected,) = llm.chat(said[:place], PARAMS, chat_template=TEMPLATE)
        assert said[place]["content"] == expected.outputs[0].text
    assert "".join(pieces) == f"{said[2]['content']}\n{said[4]['content']}\n"


def test_clear_forgets_all_but_the_system_and_exit_ends(llm) -> None:
    lines = iter(["a list", "/clear", "a set", "/exit", "never read"])
    said = converse(llm, lines, str, params=PARAMS, system="x", chat_template=TEMPLATE)

    assert [message["content"] for message in said[:2]] == ["x", "a set"]
    assert len(said) == 3
    assert next(lines) == "never read"


def test_an_interrupt_ends_the_answer_and_not_the_conversation(llm) -> None:
    spoken: list[str] = []

    def say(text: str) -> None:
        spoken.append(text)
        if len(spoken) == 1:
            raise KeyboardInterrupt

    said = converse(llm, ["a list", "a tuple"], say, params=PARAMS, chat_template=TEMPLATE)

    assert said[1]["content"] == spoken[0]
    assert said[2] == {"role": "user", "content": "a tuple"}
    assert llm.engine.num_unfinished == 0


def test_a_line_that_does_not_fit_any_more_is_refused_and_the_conversation_stays(llm) -> None:
    spoken: list[str] = []
    lines = ["a list", "x" * 2000, "a tuple"]

    said = converse(llm, lines, spoken.append, params=PARAMS, chat_template=TEMPLATE)

    assert [each["content"] for each in said[::2]] == ["a list", "a tuple"]
    (refusal,) = [each for each in spoken if each.startswith("jattn: ")]
    assert f"max_model_len is {llm.max_model_len}" in refusal
    with pytest.raises(RequestTooLong):
        converse(llm, lines[1:], str, params=PARAMS, chat_template=TEMPLATE)


def test_the_command_reads_lines_and_prints_answers(monkeypatch, capsys, tmp_path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("a list\n"))

    assert cli.main(["chat", "--chat-template", str(file), "--max-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "jattn: the model has no chat template; pass chat_template (to a command, --chat-template FILE).\n"),
        (["--chat-template", "/no/such"], "jattn: chat_template '/no/such' cannot be read: "),
    ],
)
def test_without_a_template_the_command_says_so(options, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))

    assert cli.main(["chat", *options]) == 2
    assert message in capsys.readouterr().err
