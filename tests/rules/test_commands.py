"""Commands in the pages are taken by the command line as they stand."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex

import pytest

from jattn import cli
from tests.rules.test_readme import PAGES

_CODE = re.compile(r"(?<!`)`(?:python -m )?jattn ([a-z][^`]*)`(?!`)")
_LINE = re.compile(r"^(?:python -m )?jattn ([a-z].*)$", re.MULTILINE)
_BLOCK = re.compile(r"^ *```(?:bash|sh|console|text)?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# Placeholders of the pages that are no values.
_FILLED = {"HOST:1234": "localhost:1234", "NAME": "engine", "...": ""}
_REMARK = re.compile(r" \([^)]*\)")


class Parsed(BaseException):
    """All arguments were taken."""


def commands() -> list[str]:
    found = []
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            text = page.read_text().replace("\\\n", " ")
            found += _CODE.findall(_BLOCK.sub("", text))
            found += [line for block in _BLOCK.findall(text) for line in _LINE.findall(block)]
    plain = (_REMARK.sub("", " ".join(command.split())) for command in found)
    # A further one begins with the name again; "; --settings ..." is a variant.
    return sorted({each.split("; -")[0] for command in plain for each in command.split("; jattn ")})


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_pages_is_taken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command, comments=True)
    taken = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, argv: list[str]) -> None:
        # Of other options argparse keeps the last value alone.
        appends = [each for each in parser._actions if isinstance(each, argparse._AppendAction)]
        repeated = {each for each in argv if each.startswith("--") and argv.count(each) > 1}
        assert repeated <= {flag for each in appends for flag in each.option_strings}
        taken(parser, argv)
        raise Parsed

    def run(arguments: argparse.Namespace, rest: list[str]) -> None:
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(cli, "check_exists", lambda path: None)
    monkeypatch.setattr(cli, "keeping_programs", contextlib.nullcontext)
    for name in ("generate", "chat", "try", "crosscheck", "convert", "doctor"):
        monkeypatch.setattr(cli, f"_{name}", run)

    if words in (["bench"], ["bench", "--help"]):
        assert cli.main(words) == 0
        return
    with pytest.raises(Parsed):
        cli.main([_FILLED.get(word, word) for word in words if _FILLED.get(word, word) or not word])


def test_the_pages_have_commands_of_most_kinds() -> None:
    assert {"bench", "crosscheck", "generate", "serve", "try"} <= {each.split()[0] for each in commands()}
