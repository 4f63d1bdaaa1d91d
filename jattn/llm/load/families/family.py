"""Family: one architecture of Hugging Face: its keys for the fields of a ModelConfig, and its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from jattn.llm.load.families.gguf import GGUF_NAMES, Gguf
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.config_fields import SIZE_LIMITS
from torch_core.base.checks import check_int

#: The values of config.json that a function of a family gets.
Raw: TypeAlias = Mapping[str, Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Key:
    """One key of config.json.

    Attributes:
        field: name of a field of `ModelConfig`; of its `encoder` or a part of `PARTS` if it begins with that and a dot;
            several that share a value in a tuple.
        read: the value of the file to the field's.
        write: the inverse.
        default: as in `Family.defaults`; `...` if a file needs the key, or its field has a default.
    """

    field: str | tuple[str, ...]
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same
    default: Any = ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields, as a tuple."""
        return (self.field,) if isinstance(self.field, str) else self.field

    @property
    def is_plain(self) -> bool:
        """The field has the file's value as it is."""
        return self.read is _same


def _numeric(function: Callable[[float], float], digits: int = 17) -> Callable[[Any], Any]:
    """Returns a conversion that does not change values other than positive numbers: ModelConfig refuses them."""

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            return value
        result = float(f"{function(value):.{digits}g}")
        return int(result) if result.is_integer() else result

    return convert


# A written value is rounded, so that 144 -> 1/12 -> 144 and not an adjacent number; whole numbers are ints, which
# strict readers require. The file stores the divisor of this factor.
INVERSE = (_numeric(lambda value: 1 / value), _numeric(lambda value: 1 / value, 12))
#: The file has the number whose inverse root is multiplied with here.
INVERSE_SQUARE = (_numeric(lambda value: value**-0.5), _numeric(lambda value: value**-2, 12))
BOTH_BIASES = Key(("attention_bias", "attention_output_bias"))
#: Options of GPTs and of encoders.
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
WITHOUT_GATE = {"norm_type": "layer_norm", "norm_bias": True, "gated_mlp": False}
#: Keys that every family reads unless its own keys name the field.
_COMMON_KEYS = {name: Key(name) for name in (*SIZE_LIMITS, "rms_norm_eps", "hidden_act", "tie_word_embeddings")}
#: Tensor names by module of the decoder, after the prefix of a layer: Llama's names.
_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "layer": "model.layers.{layer}.",
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An architecture that has a model of the family, and reads pictures besides.

    Attributes:
        architecture: name in config.json; its text_config has the keys of the family's own file.
        model_type: likewise.
        defaults: values of keys that text_config may leave out.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of one architecture. Everything is data, except a few small functions of the file's values.

    Attributes:
        architecture: name in config.json.
        model_type: likewise.
        keys: keys of config.json beyond the common ones, and the fields they set; a bare name is a field of that name.
        defaults: values of further keys that a file may leave out, and of these instead of their own; a function gets
            the file's values, and is used for null too.
        options: fields of `ModelConfig` that are so in every model of the family.
        derive: further fields, from the file's values.
        write: further keys of the file, from the model's config.
        derived: keys that only the family's functions read, and the values that they are written with.
        absent: common keys that the family does not have; "layer_types", too.
        aliases: other names of keys, as some files spell them.
        inert: keys with the one value that is computed here.
        ignored: keys of published files that never change the model: transformers does not read them.
        also: further architectures whose files have these weights among others.
        also_types: further model_types of the architecture.
        whole: one whose language model is of this family; it is read alone.
        windows: None without windows, "all" for every layer, or a function of a layer's index and the file's values
            that says which layers have the window if no layer_types does.
        two_sided_window: the file's key of the tokens that a query sees on both sides together, instead of
            sliding_window.
        layer_types: the files' names of types of layers, and the types of `ModelConfig.layer_types` that they are. The
            first name of a type is written; "full_attention" is always known.
        default_types: the files' names for each layer, from the values of a file without layer_types.
        rope_keys: the file's names of rope_theta, partial_rotary_factor and rope_local_base_freq, if they differ. Only
            families that name partial_rotary_factor and rope_local_base_freq read them; the latter is "rope_parameters"
            if the file has it only there, by kind of layer, as "full_attention.partial_rotary_factor" always is.
            "llama_4_scaling_beta", "alpha" and "short_mscale" are read from the object of the embedding if they are
            named.
        names: tensor names by module of the decoder, if they differ from `_NAMES`; a tuple for joined pieces. A key
            with the prefix "encoder." applies to an encoder only. "{expert}" is the expert's index; a name of experts
            without it is one tensor of all experts, [experts, in, out] or, with `experts_out_in`, [experts, out,
            in]. "{head}" is the index of a head.
        names_of: those that depend on the model's config.
        shapes: shapes in the file of vectors that have further axes there, by module; -1 for the vector's size.
        also_spelled: parts of tensor names, and how another writer spells them.
        prefix: prefix of tensor names, which files of the model without its head leave out.
        order: order of a joined or fused tensor's outputs in the file, by module: "by_group" (the queries of each key
            head, then that key and its value), "alternating" (gate and up alternate), "second_half_first" (of each head
            of queries and keys).
        in_out: linear layers are stored [in, out].
        rotates_neighbours: the pairs of a rotary embedding are neighbours in the file.
        brings_code: folders of the hub contain code that computes the same; it is not run.
        unread: a regular expression of tensors that files may have and that are not used; "{layers}" is the number of
            layers, and so the index after the last layer.
        respelled: the values of another spelling of config.json in this one, before they are looked at.
        computed: tensors that files may leave out, by module: a function of the model's config and a layer's index.
        norms_without_weights: whether the files of a model's config have no weights of norms, which are ones.
        gguf: its spelling in GGUF files; None if they are not read.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str | Key] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Raw], Raw] | None = None
    write: Callable[[ModelConfig], Raw] | None = None
    derived: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    inert: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    also_types: tuple[str, ...] = ()
    whole: Whole | None = None
    windows: str | Callable[[int, Raw], bool] | None = None
    two_sided_window: str = ""
    layer_types: Mapping[str, str] = field(default_factory=dict)
    default_types: Callable[[Raw], list[str]] | None = None
    rope_keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    names_of: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    also_spelled: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    order: Mapping[str, str] = field(default_factory=dict)
    in_out: bool = False
    experts_out_in: bool = False
    rotates_neighbours: bool = False
    brings_code: bool = False
    unread: str = ""
    respelled: Callable[[Raw], Raw] | None = None
    computed: Mapping[str, Callable[[ModelConfig, int], np.ndarray]] = field(default_factory=dict)
    norms_without_weights: Callable[[ModelConfig], bool] = lambda config: False
    gguf: Gguf | None = None

    @property
    def all_keys(self) -> dict[str, Key]:
        """Every key of config.json that sets a field."""
        own = {name: Key(key) if isinstance(key, str) else key for name, key in self.keys.items()}
        named = {name for key in own.values() for name in key.fields} | {*self.options, *self.absent}
        return {name: key for name, key in _COMMON_KEYS.items() if key.field not in named} | own

    @property
    def all_defaults(self) -> dict[str, Any]:
        """Values of all keys that a file may leave out."""
        own = {name: key.default for name, key in self.all_keys.items() if key.default is not ...}
        return {**own, **self.defaults}

    @property
    def has_states(self) -> bool:
        """Some models of the family have layers with a state between tokens."""
        return any(kind != "attention" for kind in self.layer_types.values())

    @property
    def has_experts(self) -> bool:
        """Models of the family have experts."""
        return any(field.startswith("moe.") for key in self.all_keys.values() for field in key.fields)

    def of_gguf(self) -> Family:
        """Returns the family whose tensors are named, and lie, as in its GGUF files; the family must have some."""
        spelling = self.gguf or Gguf(architecture="")
        own = {"names": {**GGUF_NAMES, **spelling.names}, "rotates_neighbours": spelling.rotates_neighbours}
        return replace(self, **own, names_of=lambda config: {}, prefix="", order={}, in_out=False, unread="")

    def tensor_name(self, module: str, config: ModelConfig) -> str | tuple[str, ...]:
        """Returns the file's name of a module of the decoder or its encoder: one name, or the names of its pieces."""
        names = {**_NAMES, **self.names, **self.names_of(config)}
        own = names.get(module, module)
        return names.get(f"encoder.{module}", own) if config.is_encoder else own


def attention_names(module: str, where: str, pieces: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
    """Returns the names of an attention layer's tensors: of queries, keys, values and the output.

    Example:
        >>> attention_names("cross_attn", "attn", "qkvo")["cross_attn.kv_proj"]
        ('attn.k', 'attn.v')
    """
    query, key, value, output = (f"{where}.{piece}" for piece in pieces)
    if module == "self_attn":
        return {"self_attn.qkv_proj": (query, key, value), "self_attn.o_proj": output}
    return {f"{module}.q_proj": query, f"{module}.kv_proj": (key, value), f"{module}.o_proj": output}


def expert_names(module: str, where: str) -> dict[str, str | tuple[str, ...]]:
    """Returns the names of experts' tensors: of gate and up, and of down."""
    return {
        f"{module}.gate_up_proj": (f"{where}.gate_proj", f"{where}.up_proj"),
        f"{module}.down_proj": f"{where}.down_proj",
    }


def stack_names(names: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Returns the names of modules that decoder and encoder both have, with the prefixes `decoder.` and `encoder.`.

    Example:
        >>> stack_names({"norm": "final_layer_norm"})
        {'norm': 'decoder.final_layer_norm', 'encoder.norm': 'encoder.final_layer_norm'}
    """
    return {
        f"{part}{module}": f"{prefix}{part or 'decoder.'}{name}"
        for part in ("", "encoder.")
        for module, name in names.items()
    }


def mlp_layer_types(config: ModelConfig) -> Raw:
    """Returns which layers have experts, as newer files say it."""
    layers = range(config.num_hidden_layers)
    return {"mlp_layer_types": ["sparse" if config.is_sparse(layer) else "dense" for layer in layers]}


def check_rotary_dim(raw: Raw) -> None:
    """Refuses a number of rotated elements that is none, from which a default follows; 0 and null mean a whole head."""
    if raw.get("rotary_dim") is not None:
        check_int("rotary_dim", raw["rotary_dim"], 0, SIZE_LIMITS["head_dim"])


def no_rope_layers(config: ModelConfig) -> Raw:
    """Returns which layers rotate, by the name of those that do not."""
    return {"no_rope_layers": [int(layer not in config.nope_layers) for layer in range(config.num_hidden_layers)]}


def every(count: int) -> Callable[[int, Raw], bool]:
    """Returns the pattern in which every `count`-th layer sees everything and the others have the window."""
    return lambda layer, raw: bool((layer + 1) % count)
