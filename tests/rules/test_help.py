"""help() of the classes that users build names every option: in the signature, and in the list of arguments."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from typing import Any

import pytest

import jattn

CLASSES = ["MultiHeadAttention", "PagedAttention", "MultiHeadLatentAttention", "LLM", "EngineConfig", "SamplingParams"]


def options_of(cls: type[Any]) -> list[str]:
    return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]


@pytest.mark.parametrize("name", CLASSES)
def test_help_lists_every_option_in_the_signature(name: str) -> None:
    cls = getattr(jattn, name)
    # From Python 3.13 on a long signature has a line for each parameter, which are indented.
    pattern = r"^ \|  __init__\(.*(?:\n \|      .*)*"
    signatures = re.findall(pattern, pydoc.plain(pydoc.render_doc(cls)), re.MULTILINE)
    assert signatures
    assert [option for option in options_of(cls) if not re.search(rf"\b{option}\b", signatures[0])] == []


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "LLM"])
def test_no_class_takes_keywords_that_its_signature_does_not_name(name: str) -> None:
    parameters = inspect.signature(getattr(jattn, name).__init__).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD] == []


@pytest.mark.parametrize("name", CLASSES)
def test_help_describes_every_option(name: str) -> None:
    cls = getattr(jattn, name)
    section = re.search(r"^(Args|Attributes):\n((?: .*\n|\n)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    assert section
    entries = re.findall(r"^    (\w[\w, \n]*):", section[2], re.MULTILINE)
    described = {option for entry in entries for option in re.split(r"[,\s]+", entry)}
    assert [option for option in options_of(cls) if option not in described] == []


def test_help_of_llm_describes_the_fields_of_engine_config_that_it_takes() -> None:
    text = inspect.getdoc(jattn.LLM) or ""
    assert [option for option in options_of(jattn.EngineConfig) if not re.search(rf"\b{option}\b", text)] == []


def test_operations_are_imported_without_docstrings() -> None:
    subprocess.run([sys.executable, "-OO", "-c", "import jattn.ops, torch_core.ops"], check=True)
