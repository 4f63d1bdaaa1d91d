"""An installation without torch and Triton, which come with extras: what runs, and what says how to get more."""

from __future__ import annotations

import subprocess
import sys

_RUN = """
import sys
sys.modules.update({"torch": None, "triton": None})
from jattn.cli import main
from jattn.ops import available_implementations
print("GENERATES", main(["generate", "--max-tokens", "2"]))
print("COMPARES", main(["crosscheck", "--max-tokens", "1"]))
print("REASON", available_implementations()["torch"])
print("DOCTOR", main(["doctor"]))
"""


def test_a_cpu_generates_and_each_missing_part_names_its_extra() -> None:
    result = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, check=True)
    assert "GENERATES 0" in result.stdout
    assert "COMPARES 2" in result.stdout
    assert "this needs a package more: torch is not installed; pip install 'jattn[torch]'" in result.stderr
    assert "REASON torch is not installed; pip install 'jattn[torch]'" in result.stdout
    assert "all parts work" in result.stdout
