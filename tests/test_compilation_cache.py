"""The command line's cache of compiled programs: its folder, its limits, and whose settings win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jattn.compilation_cache import MAX_BYTES, default_folder, keeping_programs
from tests.support.compilation_cache import programs_kept_in


def settings() -> tuple[Any, Any]:
    values = jax.config.values
    return values["jax_compilation_cache_dir"], values["jax_compilation_cache_max_size"]


@pytest.fixture(autouse=True)
def no_other_cache(monkeypatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jattn" / "programs"


def test_the_folder_is_in_the_users_cache_as_its_variable_says(monkeypatch, cache) -> None:
    assert default_folder() == cache
    for without in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", without)
        assert default_folder().is_relative_to(Path.home())
        assert default_folder().parts[-2:] == ("jattn", "programs")


def test_programs_are_kept_in_a_bounded_folder_of_the_user_alone_and_the_settings_come_back(cache) -> None:
    before = settings()

    with keeping_programs():
        assert settings() == (str(cache), MAX_BYTES)
        assert cache.stat().st_mode & 0o777 == 0o700

    assert settings() == before


def test_a_compiled_program_is_in_the_folder(cache, monkeypatch) -> None:
    monkeypatch.setattr("jattn.compilation_cache._LEAST_SECONDS", 0)

    with keeping_programs():
        jax.jit(lambda x: x * 3 + len("a program of this test"))(jnp.ones(5)).block_until_ready()

    assert list(cache.glob("*-cache"))


def test_an_option_and_jaxs_own_variable_leave_jaxs_settings_alone(monkeypatch, cache) -> None:
    before = settings()
    with keeping_programs(False):
        assert settings() == before
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    with keeping_programs():
        assert settings() == before

    assert not cache.exists()


def test_a_folder_that_others_may_write_is_not_used_and_stderr_says_so(cache, capsys) -> None:
    before = settings()
    cache.mkdir(parents=True)
    cache.chmod(0o777)

    with keeping_programs():
        assert settings() == before

    assert capsys.readouterr().err.startswith("jattn: compiled programs are not kept: others may write the cache ")


def test_a_folder_that_cannot_be_made_is_no_error(cache, capsys) -> None:
    cache.parent.write_text("a file")

    with keeping_programs():
        pass

    assert "jattn: compiled programs are not kept: " in capsys.readouterr().err


def test_a_cache_that_was_on_before_is_on_again(cache, tmp_path) -> None:
    with programs_kept_in(tmp_path / "own"):
        with keeping_programs():
            pass
        assert settings()[0] == str(tmp_path / "own")
