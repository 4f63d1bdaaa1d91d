"""Keeps an engine's weights those of a model whose owner changes it in place."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from flax import nnx

from jattn.llm.models.changes import ModuleWatch
from jattn.llm.reports import LOGGER
from torch_core.base.checks import check_bool


class _Updated(Protocol):
    """An engine."""

    @property
    def spans_processes(self) -> bool: ...
    def update_weights(self, state: Any, *, partial: bool = ...) -> None: ...


class Follower:
    """Compares a model's arrays with those that its engine has, and replaces the engine's.

    Args:
        model: the engine's model as its owner has it; it is not kept alive.
        follow: replace the engine's weights; else a difference is logged once.

    Raises:
        InvalidInput: `follow` is no bool.
    """

    def __init__(self, model: nnx.Module, follow: bool) -> None:
        check_bool("follow", follow)
        self._follows, self._warned = follow, False
        self._model = weakref.ref(model)
        self._watch = ModuleWatch(model)
        # Held while the weights are replaced: the caller that comes second finds them new.
        self._updating = threading.Lock()

    def check(self, engine: _Updated, *, modules: bool = False) -> None:
        """Replaces the weights of an engine if an array was replaced in its model.

        Args:
            engine: the engine.
            modules: look for replaced modules, too.

        Raises:
            InvalidInput: as `Engine.update_weights`; the next call tries again.
        """
        if not modules and not self._watch.is_changed():
            return
        with self._updating:
            if not self._watch.is_changed(modules=modules):
                return
            changes = self._watch.changes()
            if not changes or (self._warned and not self._follows):
                return
            if not self._follows or engine.spans_processes:
                self._warned, self._follows = True, False
                LOGGER.warning(
                    "%d arrays of the model were replaced in place (%s first); the engine goes on with the old ones. "
                    "Call update_weights(model)%s.",
                    len(changes),
                    ".".join(map(str, next(iter(changes)))),
                    " in every process" if engine.spans_processes else ", or build the engine with follow=True",
                )
                return
            model = self._model()
            # A model that is split over devices has parts of the parameters, under the names of the whole ones.
            is_whole = getattr(model, "parallel", None) is None and not self._watch.has_new_parts
            if model is None or is_whole:
                engine.update_weights(nnx.FlatState(changes.items(), sort=False), partial=True)
            else:
                engine.update_weights(model)
            self._watch.mark_seen()

    def mark_seen(self) -> None:
        """Takes the model's present arrays for those of the engine."""
        self._watch.mark_seen()
