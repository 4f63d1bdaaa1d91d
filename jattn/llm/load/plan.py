"""Which tensors a model folder must hold, with which shapes, and where in the Flax model each one goes.

A tensor that is stored in fewer bits consists of several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jattn.llm.load.config import family_of
from jattn.llm.load.families import Family
from jattn.llm.load.joined import num_unused, orders, output_sizes, qkv_order
from jattn.llm.load.tensor_file import QUANTIZED_DTYPES, Tensors
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.joined import MAMBA_IN, QKV, shared_sizes
from jattn.llm.models.quantized import group_rows
from jattn.llm.models.shapes import ParameterPath, parameter_shapes
from torch_core.base.errors import Unsupported

#: Old writers' names of a norm's parameters.
_OF_NORMS = {".weight": ".gamma", ".bias": ".beta"}
_EXPERTS = ("moe.gate_up_proj", "moe.up_proj", "moe.down_proj")
#: Parameters that are no module's kernel, weight or bias.
_BARE = (
    "sinks",
    "e_score_correction_bias",
    "final_logits_bias",
    "A_log",
    "D",
    "dt_bias",
    "slope_rate",
    "alpha_p",
    "alpha_n",
    "beta",
    "eps",
    "layer_scalar",
    "router_scale",
    "per_expert_scale",
)
#: Ends of names of a weight of 4 bits: uint8[in / 2, out], the number of an even input in the lower four bits; and
#: float32[2 x groups, out], the scales and then the zero points.
INT4_KERNEL, INT4_SCALE = "_int4", "_int4_scales"
_BLOCK = 128
_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the file: its name and shape there."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter of the Flax model and the tensors that it is built from.

    Attributes:
        path: path of the parameter in the nnx state.
        shape: shape of the parameter.
        pieces: joined in this order along the parameter's last axis. Pieces of one axis less are one expert's: those
            of the first come first, and each expert's are joined and then stacked.
        transposed: the file holds each piece as [out, in], the model as [in, out].
        is_conv: the model holds the transpose of what is described here; and the file each piece as [channels, 1,
            width].
        order: place in the joined pieces of each element of the parameter's last axis; None if it is its own.
        num_unused: zeros after the joined pieces of a matrix, along its last axis.
    """

    path: ParameterPath
    shape: tuple[int, ...]
    pieces: tuple[TensorPlan, ...]
    transposed: bool = False
    is_conv: bool = False
    order: np.ndarray | None = field(default=None, compare=False)
    num_unused: int = 0

    @property
    def is_float32(self) -> bool:
        """Whether the parameter is float32 in models of every dtype."""
        return (
            self.path[-1] in ("e_score_correction_bias", "A_log", "D", "dt_bias", "slope_rate")
            or "weights_proj" in self.path
        )

    @property
    def num_stacked(self) -> int:
        """The number of stacked groups of pieces; 0 if the pieces are only joined."""
        return self.shape[0] if len(self.pieces[0].shape) < len(self.shape) > 1 else 0


def plan_parameters(
    config: ModelConfig, *, prefix: str | None = None, family: Family | None = None
) -> tuple[ParameterPlan, ...]:
    """Returns the plan of every parameter, from the config alone.

    Args:
        config: config of the model; its family names the tensors and says how they lie in the file.
        prefix: replaces the family's own prefix in this file; None keeps it.
        family: names the tensors instead of the config's family.

    Raises:
        Unsupported: no family has this combination of options.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> plan = {parameter.path: parameter for parameter in plan_parameters(config)}
        >>> fused = plan["layers", 0, "self_attn", "qkv_proj", "kernel"]
        >>> fused.shape, [piece.name.rsplit(".", 2)[1] for piece in fused.pieces]
        ((64, 128), ['q_proj', 'k_proj', 'v_proj'])
    """
    family = family_of(config) if family is None else family
    prefix = family.prefix if prefix is None else prefix
    planners = {"": _Planner(config, family, prefix)}
    if config.encoder is not None:
        planners["encoder"] = _Planner(config.encoder, family, prefix, depth=1)
    return tuple(
        planners[str(path[0]) if path[0] in planners else ""].plan(path, shape)
        for path, shape in parameter_shapes(config).items()
    )


def fewest_tensors(config: ModelConfig, family: Family) -> int:
    """Returns how many tensors a file of this config has at least, counted without naming them."""
    shapes = parameter_shapes(config)
    apart = "{expert}" in str(family.tensor_name("moe.down_proj", config))
    experts = (shape[0] for path, shape in shapes.items() if path[-3:-1] == ("moe", "down_proj")) if apart else ()
    return len(shapes) + sum(experts)


def spelled_as_found(
    plan: tuple[ParameterPlan, ...], names: Container[str], family: Family, *, is_whole: bool = False
) -> tuple[ParameterPlan, ...]:
    """Returns the plan with the tensors' names as files of other writers spell them.

    `is_whole` says that the file has further models; see `Family.whole`.
    """
    found = functools.partial(found_name, names=names, family=family, is_whole=is_whole)
    return tuple(
        replace(parameter, pieces=tuple(replace(piece, name=found(piece.name)) for piece in parameter.pieces))
        for parameter in plan
    )


def found_name(name: str, names: Container[str], family: Family, is_whole: bool) -> str:
    """Returns how the file spells a tensor's name; the name itself if it has none of the spellings."""
    front, dot, last = name.rpartition(".")
    others = (front + _OF_NORMS.get(dot + last, ""), *(name.replace(*each) for each in family.also_spelled.items()))
    if is_whole:
        others = (f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
    return next((each for each in (name, *others) if each in names), name)


def parts_of(piece: TensorPlan, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that hold a planned one and their shapes; only itself if it is not quantised.

    MXFP4 is gpt-oss's: `name_blocks` uint8[..., out, in / 32, 16], two numbers in a byte, and `name_scales`
    uint8[..., out, in / 32], of a tensor [..., in, out]. FP8 is an E4M3 tensor [out, in] with its scales: DeepSeek's
    and Qwen 3's `weight_scale_inv` for each block of 128 x 128, or compressed-tensors' `weight_scale` for each of them,
    for each output or for the tensor. Weights of 4 bits are those of `unpacked_tensors`.
    """
    name, shape = piece.name, piece.shape
    if name + INT4_KERNEL in tensors:
        return {part: tensors[part].tensors[part].shape for part in (name + INT4_KERNEL, name + INT4_SCALE)}
    if name not in tensors and f"{name}_blocks" in tensors:
        *front, inputs, outputs = shape
        groups = (*front, outputs, inputs // _MXFP4_GROUP)
        return {f"{name}_blocks": (*groups, _MXFP4_GROUP // 2), f"{name}_scales": groups}
    if name not in tensors or tensors[name].tensors[name].dtype not in QUANTIZED_DTYPES.values():
        return {name: shape}
    scale = next((scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in tensors), None)
    if scale is None or len(shape) != 2:
        raise Unsupported(
            f"{tensors[name].path.name}: tensor {name!r} has dtype {tensors[name].tensors[name].dtype} and no "
            f"'{name}_scale_inv' beside it; this build reads fp8 with scales by tensor, by output or by blocks of "
            f"{_BLOCK}, and MXFP4."
        )
    blocks, found = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK)), tensors[scale].tensors[scale].shape
    return {name: shape, scale: found if found in ((), (1,), (shape[0], 1)) else blocks}


def kernel_and_scale(
    piece: TensorPlan, read: Callable[[str], Any], parts: dict[str, tuple[int, ...]], xp: Any, *, transposed: bool
) -> tuple[Any, Any]:
    """Returns a planned tensor of several parts as `jattn.llm.models.quantized.dequantize` takes it: [..., in, out].

    `read` gives a part by its name, as an array of `xp`, numpy or jax.numpy. An E4M3 tensor is [out, in] if it is
    transposed, and [in, out] otherwise.
    """
    kernel, scale = (read(name) for name in parts)
    if piece.name + INT4_KERNEL in parts:
        return kernel, scale
    if piece.name not in parts:
        return kernel.reshape(*scale.shape[:-1], -1).swapaxes(-1, -2), scale.swapaxes(-1, -2)
    scale = scale.astype("float32")
    scale = scale.reshape(1, 1) if scale.ndim < 2 else scale
    if transposed:
        kernel, scale = kernel.T, scale.T
    outputs = kernel.shape[-1]
    return kernel, xp.repeat(scale, group_rows(outputs, scale.shape[-1]), -1)[:, :outputs]


class _Planner:
    def __init__(self, config: ModelConfig, family: Family, prefix: str, depth: int = 0) -> None:
        self._config, self._family, self._prefix, self._depth = config, family, prefix, depth
        self._orders = orders(config, family)

    def plan(self, path: ParameterPath, shape: tuple[int, ...]) -> ParameterPlan:
        family, leaf, inner = self._family, path[-1], path[self._depth :]
        where, layer = "", inner[1] if inner[0] == "layers" else None
        if layer is not None:
            where, inner = str(family.tensor_name("layer", self._config)), inner[2:]
        module = ".".join(map(str, inner[:-1]))
        if leaf in _BARE:
            module, suffix = ".".join((*filter(None, (module,)), str(leaf))), ""
        else:
            suffix = ".bias" if leaf == "bias" else ".weight"
        names = family.tensor_name(module, self._config)
        names = (names,) if isinstance(names, str) else names
        order = self._orders.get(module)
        config = self._config if layer is None else self._config.of_layer(int(layer))
        if module == MAMBA_IN and shared_sizes(config) is not None:
            names, order = (*family.tensor_name(QKV, config), *names), self._orders.get(QKV)
        if module == QKV and (config.attention_k_eq_v or config.value_head is not None):
            names = names[:2]
        if module == QKV and shape[-1] == config.query_size * (1 + config.attn_output_gate):
            # Keys and values are another layer's, and queries come first.
            names, order = names[:1], qkv_order(self._config, family, 0)
        # Of a depthwise convolution, [channels, width].
        is_conv = leaf == "weight" and module.rpartition(".")[-1].startswith("conv") and len(shape) == 2
        transposed = is_conv or (leaf == "kernel" and not (family.in_out and where))
        is_expert, is_head = module in _EXPERTS, "{head}" in names[0]
        unused = num_unused(module, shape[-1], config)
        if order is not None:
            order = np.append(order, np.arange(len(order), shape[-1]))
        if is_expert and "{expert}" not in names[0]:
            # All experts in one tensor.
            suffix, transposed = "_bias" if leaf == "bias" else "", family.experts_out_in and leaf == "kernel"
            pieces = [(names[0], (*shape[:-2], shape[-1], shape[-2]) if transposed else shape)]
        else:
            if is_conv:
                shape = shape[::-1]
            front = shape[1:-1] if is_expert or is_head else shape[:-1]
            sizes = output_sizes(module, shape[-1] - unused, len(names), config)
            pieces = [
                (
                    name.replace("{expert}", str(one)).replace("{head}", str(one)),
                    (size, *[1] * is_conv, *front) if transposed else (*front, size),
                )
                for one in range(shape[0] if is_expert or is_head else 1)
                for name, size in zip(names, sizes, strict=True)
            ]
        if module in family.shapes:
            pieces = [
                (name, tuple(shape[-1] if size < 0 else size for size in family.shapes[module])) for name in names
            ]
        where = where.format(layer=layer)
        planned = tuple(TensorPlan(self._renamed(f"{where}{name}{suffix}"), each) for name, each in pieces)
        return ParameterPlan(path, shape, planned, transposed, is_conv, order, unused)

    def _renamed(self, name: str) -> str:
        own = self._family.prefix
        return self._prefix + name.removeprefix(own) if own and name.startswith(own) else name
