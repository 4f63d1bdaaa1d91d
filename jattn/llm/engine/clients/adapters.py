"""The adapters that an engine knows by name, and an engine's methods for them, with vLLM's names."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.engine.device.adapters import engine_targets
from jattn.llm.engine.device.weights import are_finite
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.request.lora import LoadedAdapter, LoRARequest
from jattn.llm.load.adapter_pieces import AdapterWeights
from jattn.llm.load.adapter_state import adapter_of
from jattn.llm.load.adapters import load_adapter
from jattn.llm.models import AdapterTarget, Decoder, ModelConfig
from jattn.llm.models.changes import ModuleWatch
from jattn.llm.reports import LOGGER
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class _Source:
    """A module whose adapter follows it."""

    module: Any
    watch: ModuleWatch
    options: dict[str, Any]


class AdapterRegistry:
    """The adapters of an engine, or of several copies, by name; any thread may call any method.

    They are in host memory, or wherever their arrays were given, until they are removed. Requests keep the version that
    they began with.

    Args:
        model: the engine's model.
        config: whether there are adapters, and the largest rank.

    Attributes:
        max_loras: number of adapters on the device at the same time.
    """

    def __init__(self, model: object, config: EngineConfig) -> None:
        self._model = model.config if isinstance(model, Decoder) else None
        self._config, self.max_loras = config, config.max_loras
        self._targets: frozenset[AdapterTarget] = frozenset()
        if config.enable_lora and self._model is not None:
            self._targets = frozenset(engine_targets(self._model, config))
        self._loaded: dict[str, tuple[LoadedAdapter, LoRARequest]] = {}
        self._sources: dict[str, _Source] = {}
        self._num_loaded = 0
        self._pinned: set[int] = set()
        self._lock = threading.RLock()

    def add(self, lora_request: LoRARequest, adapter: Any = None, *, follow: bool = True, **options: Any) -> None:
        """Loads an adapter from its folder, or from memory; see `Engine.add_lora`."""
        config, name = self._model_config(), lora_request.lora_name
        with self._lock:
            if adapter is not None:
                watch = ModuleWatch(adapter) if follow and isinstance(adapter, nnx.Module) else None
                self._put(lora_request, self._finite(name, adapter_of(adapter, config, **options)))
                self._sources.pop(name, None)
                if watch is not None:
                    self._sources[name] = _Source(weakref.ref(adapter), watch, options)
            elif not lora_request.lora_path:
                raise InvalidInput("lora_path", "is empty", "name the adapter's folder, or give the adapter")
            elif name in self._loaded and not lora_request.load_inplace:
                raise InvalidInput("lora_name", f"{shown(name)} is loaded", "load_inplace=True replaces it")
            else:
                self._put(lora_request, load_adapter(lora_request.lora_path, config))
                self._sources.pop(name, None)

    def remove(self, name: str | int) -> None:
        """Forgets an adapter, pinned or not; requests that have it go on.

        Raises:
            InvalidInput: no adapter has the name.
        """
        with self._lock:
            known = self._known(name)
            del self._loaded[known.name]
            self._sources.pop(known.name, None)
            self._pinned.discard(known.version)

    def pin(self, name: str | int) -> None:
        """Keeps an adapter in its slot; see `Engine.pin_lora`."""
        with self._lock:
            known = self._known(name)
            if not known.is_pinned and len(self._pinned) >= self.max_loras:
                raise self._all_pinned("lora_name", known.name)
            self._pinned.add(known.version)

    def requests(self) -> dict[str, LoRARequest]:
        """Returns how each adapter was loaded, by name, in the order of loading."""
        return {name: request for name, (_, request) in list(self._loaded.items())}

    def of(self, lora: str | LoRARequest | None) -> LoadedAdapter | None:
        """Returns the adapter of a request, loaded if it must be.

        Raises:
            InvalidInput: it is not known, another folder has its name, or the folder does not fit.
        """
        if lora is None:
            return None
        if isinstance(lora, LoRARequest):
            with self._lock:
                known = self._loaded.get(lora.lora_name)
                # One request for several prompts loads its folder once.
                if known is None or (lora.load_inplace and lora.lora_path and lora is not known[1]):
                    self.add(lora)
                elif lora.lora_path and lora.lora_path != known[1].lora_path:
                    problem = f"{shown(lora.lora_name)} was loaded from {shown(known[1].lora_path)}"
                    raise InvalidInput("lora_name", problem, "load_inplace=True replaces it")
            lora = lora.lora_name
        source = self._sources.get(lora) if isinstance(lora, str) else None
        if source is not None and source.watch.is_changed():
            self._follow(lora, source)
        known = self._known(lora)
        if not known.is_pinned and len(self._pinned) >= self.max_loras:
            raise self._all_pinned("lora", known.name)
        return known

    def _follow(self, name: str, source: _Source) -> None:
        """Takes an adapter again whose module's arrays were replaced, as `nnx.Optimizer.update` does."""
        with self._lock:
            module = source.module()
            if module is not None and self._sources.get(name) is source and source.watch.is_changed():
                found = adapter_of(module, self._model_config(), **source.options)
                self._put(self._loaded[name][1], self._finite(name, found))
                source.watch.mark_seen()

    def _finite(self, name: str, found: AdapterWeights) -> AdapterWeights:
        """Returns an adapter from memory, whose numbers are checked as those of `update_weights`."""
        kind = self._config.non_finite_weights
        if kind != "accept" and not are_finite(list(map(jnp.asarray, jax.tree.leaves(list(found.weights.values()))))):
            problem = "has NaN or infinite numbers"
            if kind == "refuse":
                raise InvalidInput(f"adapter {shown(name)}", problem, "what was loaded before stays")
            LOGGER.warning("adapter %s %s.", shown(name), problem)
        return found

    def _put(self, request: LoRARequest, found: AdapterWeights) -> None:
        if found.rank > self._config.max_lora_rank:
            wanted = f"the engine's max_lora_rank is {self._config.max_lora_rank}"
            raise InvalidInput(f"the rank of {shown(request.lora_name)}", f"is {found.rank}", wanted)
        for target in found.weights:
            if target not in self._targets:
                own = sorted({each.module for each in self._targets})
                wanted = f"name it in lora_target_modules; the engine's are {', '.join(own)}"
                raise InvalidInput(target.name, f"has an adapter in {shown(request.lora_name)}", wanted)
        self._num_loaded += 1
        name = request.lora_name
        adapter = LoadedAdapter(
            name, self._num_loaded, found.rank, found.weights, request.lora_path, pinned=self._pinned
        )
        old = self._loaded.get(name)
        self._loaded[name] = adapter, request
        if old is not None and old[0].is_pinned:
            # Another version of a pinned adapter is pinned in its place.
            self._pinned.add(adapter.version)
            self._pinned.discard(old[0].version)

    def _known(self, name: Any) -> LoadedAdapter:
        self._model_config()
        known = self._loaded.get(name) if isinstance(name, str) else None
        if type(name) is int and name:
            found = [each for each in list(self._loaded.values()) if each[1].lora_int_id == name]
            if len(found) > 1:
                names = " and ".join(shown(each.name) for each, _ in found)
                raise InvalidInput("lora", f"is {name}, the lora_int_id of {names}", "give a name")
            known = found[0] if found else None
        if known is None:
            names = ", ".join(map(shown, list(self._loaded)[:20])) or "none"
            raise InvalidInput("lora", f"{shown(name)} is not loaded", f"the engine has {names}")
        return known[0]

    def _all_pinned(self, argument: str, name: str) -> InvalidInput:
        names = ", ".join(shown(each.name) for each, _ in self._loaded.values() if each.is_pinned)
        wanted = f"all of max_loras ({self.max_loras}) are pinned: {names}. Remove one of them"
        return InvalidInput(argument, f"{shown(name)} gets no slot", wanted)

    def _model_config(self) -> ModelConfig:
        if not self._config.enable_lora or self._model is None:
            raise InvalidInput("lora", "is given", "the engine needs EngineConfig(enable_lora=True)")
        return self._model


class ServesAdapters:
    """The methods of an engine for its adapters.

    Attributes:
        adapters: the adapters by name.
    """

    adapters: AdapterRegistry

    def add_lora(
        self,
        lora_request: LoRARequest | str,
        adapter: Any = None,
        *,
        index: int = 0,
        alpha: float | None = None,
        follow: bool = True,
    ) -> None:
        """Loads an adapter, or another version of one; requests that run keep the version that they began with.

        It moves to the device when a request first needs it. Nothing is compiled. Cached prefixes of another version
        are not found any more.

        Args:
            lora_request: name and folder; a name alone for an `adapter` in memory.
            adapter: instead of the folder: `jattn.llm.models.Adapters`, or an nnx module, its state or a mapping with
                pairs of arrays named lora_a and lora_b (flax, qwix, SkyRL-tx), in modules with Hugging Face's names
                of layers or with ours.
            index: number of the adapter, where `adapter` has several.
            alpha: the products are scaled by alpha / rank; None for the adapter's own, or for the rank.
            follow: an array that is replaced in the module (by `nnx.Optimizer.update`) is taken by the next request
                that names the adapter.

        Raises:
            InvalidInput: no such folder, an adapter of another model, a rank above max_lora_rank, numbers that are not
                finite (see `EngineConfig.non_finite_weights`), or a folder for a name that is taken, unless
                `load_inplace` says so.
            Unsupported: DoRA, biases, or layers that have no adapters here.
        """
        request = LoRARequest(lora_request) if isinstance(lora_request, str) else lora_request
        if not isinstance(request, LoRARequest):
            raise InvalidInput("lora_request", f"is a {type(request).__name__}", "it must be a LoRARequest or a name")
        options = {"index": index, "alpha": alpha} if adapter is not None else {}
        self.adapters.add(request, adapter, follow=follow, **options)

    def remove_lora(self, name: str | int) -> None:
        """Forgets an adapter, by its name or its `lora_int_id`; requests that have it go on.

        Raises:
            InvalidInput: no adapter has the name, or several have the number.
        """
        self.adapters.remove(name)

    def pin_lora(self, name: str | int) -> None:
        """Keeps an adapter on the device until it is removed, from the first request that has it on.

        No other adapter takes its slot, and a version that is loaded in its place is pinned, too.

        Args:
            name: its name, or its `lora_int_id`.

        Raises:
            InvalidInput: no adapter has the name, or as many as there are slots are pinned. Requests with other
                adapters are refused then.
        """
        self.adapters.pin(name)

    def list_loras(self) -> dict[str, LoRARequest]:
        """Returns how each adapter was loaded, by name."""
        return self.adapters.requests()
