"""Warnings of our own modules are errors; those of other packages are not."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def warn_from(module: str) -> None:
    warnings.warn_explicit("out of use", DeprecationWarning, "somewhere.py", 1, module=module)


@pytest.mark.parametrize("module", ["torch_core.launch.cuda", "jattn", "jattn.ops.paged", "tests.rules.test_warnings"])
def test_a_warning_of_our_own_module_is_an_error(module: str) -> None:
    with pytest.raises(DeprecationWarning, match="out of use"):
        warn_from(module)


def test_the_warning_of_a_call_in_a_test_is_an_error() -> None:
    with pytest.raises(UserWarning, match="said here"):
        warnings.warn("said here", stacklevel=1)


@pytest.mark.parametrize("module", ["pytest_benchmark.logger", "triton.runtime.jit", "jattn_friend"])
def test_a_warning_of_another_package_is_recorded_alone(module: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warn_from(module)

    assert [str(warning.message) for warning in seen] == ["out of use"]


def test_a_plugin_that_warns_while_it_is_configured_does_not_end_the_suite(tmp_path: Path) -> None:
    (tmp_path / "warning_plugin.py").write_text(
        "import warnings\n\ndef pytest_configure(config):\n    warnings.warn('no benchmarks under xdist')\n"
    )
    test = f"{Path(__file__)}::test_the_warning_of_a_call_in_a_test_is_an_error"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "warning_plugin", "-p", "no:cacheprovider", test]

    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False
    )

    assert "1 passed" in done.stdout, done.stdout + done.stderr
