"""Arrays of a module that its owner replaced in place, found by identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from flax import nnx

Path = tuple[Any, ...]


@dataclass(slots=True)
class _Place:
    """A variable's place in its module.

    Attributes:
        path: path from the root.
        key: its last part.
        owner: reference to the module or container that has the variable.
        seen: reference to the variable's array when it was last looked at.
    """

    path: Path
    key: Any
    owner: Callable[[], Any]
    seen: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Edge:
    """A module or container within another one."""

    path: Path
    owner: Callable[[], Any]
    child: Callable[[], Any]


class ModuleWatch:
    """Finds the variables of a module whose arrays were replaced, as `nnx.Optimizer.update` and `nnx.update` do.

    It compares identities and reads no value. It keeps neither the module nor its arrays alive: parts that are gone
    count as unchanged. States of random streams are not watched.

    Args:
        module: the module; its arrays count as seen.

    Attributes:
        has_new_parts: `changes` found modules that replaced others, or other attributes, since the arrays were seen.

    Example:
        >>> import jax.numpy as jnp
        >>> module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> watch = ModuleWatch(module)
        >>> module.bias.set_value(jnp.ones(3))
        >>> watch.is_changed(), list(watch.changes())
        (True, [('bias',)])
    """

    def __init__(self, module: nnx.Module) -> None:
        state = nnx.state(module, nnx.Not(nnx.RngState))
        paths = nnx.to_flat_state(cast(Any, state)).paths
        edges: dict[Path, _Edge] = {}
        self._places: list[_Place] = []
        for path in paths:
            owner = module
            for depth, key in enumerate(path[:-1], 1):
                child = _child(owner, key)
                if path[:depth] not in edges:
                    edges[path[:depth]] = _Edge(path[:depth], _reference(owner), _reference(child))
                owner = child
            self._places.append(_Place(path, path[-1], _reference(owner), _reference(_array(owner, path[-1]))))
        self._edges = list(edges.values())
        self.has_new_parts = False
        self._num_attributes = self._count_attributes()

    def is_changed(self, *, modules: bool = False) -> bool:
        """Returns whether an array was replaced in its variable.

        It takes 0.2 us for each variable, 40 us for a model of 32 layers; three times as long with `modules`.

        Args:
            modules: look for modules that replaced others, too.
        """
        if modules:
            self._find_replaced_modules()
        for place in self._places:
            owner = place.owner()
            if owner is None:
                continue
            # A call of `_array` would take a third of the time again.
            try:
                array = owner.__dict__[place.key].get_raw_value()
            except (AttributeError, LookupError):
                array = _array(owner, place.key)
            if array is not place.seen():
                return True
        return False

    def changes(self) -> dict[Path, Any]:
        """Returns the replaced arrays by path, including those of modules that replaced others."""
        self._find_replaced_modules()
        self.has_new_parts |= self._num_attributes != self._count_attributes()
        found = {}
        for place in self._places:
            owner = place.owner()
            array = None if owner is None else _array(owner, place.key)
            if owner is not None and array is not place.seen():
                found[place.path] = array
        return found

    def mark_seen(self) -> None:
        """Takes the present arrays for seen."""
        self._find_replaced_modules()
        for place in self._places:
            owner = place.owner()
            array = None if owner is None else _array(owner, place.key)
            if owner is not None and array is not place.seen():
                place.seen = _reference(array)
        self.has_new_parts, self._num_attributes = False, self._count_attributes()

    def _count_attributes(self) -> int:
        """Returns the number of attributes of all modules that have variables."""
        return sum(len(getattr(place.owner(), "__dict__", ())) for place in self._places)

    def _find_replaced_modules(self) -> None:
        for index, edge in enumerate(self._edges):
            owner, old = edge.owner(), edge.child()
            child = None if owner is None else _child(owner, edge.path[-1])
            if owner is None or child is old:
                continue
            self.has_new_parts, depth = True, len(edge.path)
            self._edges[index] = _Edge(edge.path, edge.owner, _reference(child))
            for number in range(index + 1, len(self._edges)):
                inner = self._edges[number]
                if inner.path[:depth] == edge.path and inner.path != edge.path:
                    self._edges[number] = _Edge(
                        inner.path, _reference(_at(child, inner.path[depth:-1])), _Never(inner.child)
                    )
            for place in self._places:
                if place.path[:depth] == edge.path:
                    place.owner = _reference(_at(child, place.path[depth:-1]))


@dataclass(frozen=True, slots=True)
class _Never:
    """A reference that no present object equals, so that what lies below a replaced module is looked up."""

    before: Callable[[], Any]

    def __call__(self) -> Any:
        return self


def _child(owner: Any, key: Any) -> Any:
    values = getattr(owner, "__dict__", {})
    if key in values:
        return values[key]
    try:
        return owner[key]
    except (TypeError, LookupError):
        return None


def _at(node: Any, path: Path) -> Any:
    for key in path:
        node = _child(node, key)
    return node


def _array(owner: Any, key: Any) -> Any:
    variable = _child(owner, key)
    raw = getattr(variable, "get_raw_value", None)
    return variable if raw is None else raw()


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        # A plain list or number, which nothing else needs to free.
        return lambda: value
