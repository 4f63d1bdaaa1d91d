"""The parts of a model's config: experts, attention over latents, and the scaling of rotary frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Choices, Limits, check_fields
from torch_core.base.specs import MAX_HEAD_SIZE

#: The longest context of any model, in tokens.
MAX_CONTEXT = 1 << 24
Factor: TypeAlias = Annotated[float, Limits(1e-6, 1e6)]
_ORIGINAL = "original_max_position_embeddings"
#: The keys of each type: those that it needs, and those that it may have.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (_ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("factor", _ORIGINAL, "short_factor", "long_factor"), ("attention_factor",)),
    "proportional": (("factor", "partial_rotary_factor"), ()),
}
#: Of a head's elements, and of a feed-forward layer's.
MAX_HEAD_DIM, MAX_INNER = MAX_HEAD_SIZE, 1 << 18
#: A bool of a configuration, which is JSON's in a file.
Flag: TypeAlias = Annotated[bool, Limits(wanted="true or false")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A feed-forward layer of experts; every token goes to some of them, none is dropped.

    Attributes:
        num_experts: number of experts of a layer.
        num_experts_per_tok: number of experts of a token: those with the largest scores.
        intermediate_size: width of one expert.
        scoring_func: a token's scores are the "softmax" of its router logits over all experts, or each one's "sigmoid";
            or its experts are chosen one after the other by "sparsemixer" (Liu et al. 2024, arXiv:2409.12136).
        sparsemixer_eps: half of the relative distance from the best logit up to which others count in its softmax.
        apply_router_weight_on_input: the weights multiply the experts' inputs instead of their outputs.
        norm_topk_prob: normalise the weights of a token's experts to sum 1; if False, the weights are the scores.
        routed_scaling_factor: factor of those weights.
        score_correction_bias: choose experts by scores plus a bias per expert, which is not part of the weights
            (DeepSeek-V3, arXiv:2412.19437).
        n_group: number of groups of neighbouring experts; a token's experts are in the best `topk_group` of them. A
            group is ranked by its best expert, or by its best two if there is a correction bias. 1 for no groups.
        topk_group: number of groups of a token.
        router_bias: the router has a bias.
        expert_bias: the experts' projections have one.
        shared_intermediate_size: width of an expert that every token goes to, with a gate of its own; 0 for none.
        shared_expert_gate: whether it has that gate.
        n_shared_experts: number of experts of `intermediate_size` that every token goes to, added without a weight.
        with_mlp: layers of experts have an ordinary feed-forward part too, of the model's intermediate_size. Both have
            a norm before and after them, and are added. The router has a norm of its own, and each expert a factor of
            its weights (Gemma 4).
        output_norm: the experts' output has a norm (A.X K1).
        dense_layers: indices of the layers that have an ordinary feed-forward part instead.

    Raises:
        InvalidInput: a value has the wrong type or is outside its limits.
        Unsupported: another scoring_func.
    """

    num_experts: Annotated[int, Limits(1, 4096)]
    num_experts_per_tok: int
    intermediate_size: int
    scoring_func: Annotated[str, Choices("softmax", "sigmoid", "sparsemixer", error=Unsupported)] = "softmax"
    sparsemixer_eps: Annotated[float, Limits(0.0, 1.0)] = 0.01
    apply_router_weight_on_input: Flag = False
    norm_topk_prob: Flag = True
    routed_scaling_factor: Annotated[float, Limits(1e-6, 1e6)] = 1.0
    score_correction_bias: Flag = False
    n_group: int = 1
    topk_group: int = 1
    router_bias: Flag = False
    expert_bias: Flag = False
    shared_intermediate_size: Annotated[int, Limits(0, MAX_INNER)] = 0
    shared_expert_gate: Flag = True
    n_shared_experts: int = 0
    with_mlp: Flag = False
    output_norm: Flag = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A model has an intermediate_size of its own.
        check_int("moe.intermediate_size", self.intermediate_size, 1, MAX_INNER)
        check_fields(self)
        check_int("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)
        check_int("n_shared_experts", self.n_shared_experts, 0, MAX_INNER // self.intermediate_size)
        if self.shared_intermediate_size and self.n_shared_experts:
            problem = f"is {self.shared_intermediate_size} and n_shared_experts {self.n_shared_experts}"
            raise InvalidInput("shared_intermediate_size", problem, "give one")
        check_int("n_group", self.n_group, 1, self.num_experts)
        check_int("topk_group", self.topk_group, 1, self.n_group)
        size, least = self.num_experts // self.n_group, 1 + (self.score_correction_bias and self.n_group > 1)
        if self.num_experts % self.n_group or size < least:
            wanted = f"it must divide them into groups of at least {least}"
            raise InvalidInput("n_group", f"is {self.n_group} with {self.num_experts} experts", wanted)
        if self.num_experts_per_tok > self.topk_group * size:
            wanted = f"{self.topk_group} groups have {self.topk_group * size} experts"
            raise InvalidInput("num_experts_per_tok", value=self.num_experts_per_tok, wanted=wanted)

    @property
    def shared_width(self) -> int:
        """Width of the shared expert, which every token goes to; 0 for none."""
        return self.shared_intermediate_size or self.n_shared_experts * self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one cached row of a token serves all heads.

    Attributes:
        kv_lora_rank: number of elements of a token's latent.
        qk_nope_head_dim: number of elements of a query or key head that are not rotated.
        qk_rope_head_dim: number of rotated elements; those of a key are the same in all heads, and cached after the
            latent.
        v_head_dim: number of elements of a value head.
        q_lora_rank: width of the compressed query; None for a query without compression.
        index_n_heads: number of heads of the indexer that chooses the tokens of a query (DeepSeek-V3.2); None without
            one.
        index_head_dim: number of elements of each of these heads; a token's index key, which all heads share, is cached
            too.
        index_topk: most tokens that a query attends to.
        rope_interleave: pairs of the rotary embedding are neighbours; False for (element i, element i + half).
        index_rope_interleave: likewise in the indexer.
        index_shared_layers: indices of layers without an indexer, which attend to the tokens that the last indexer
            before them chose (IndexCache, arXiv:2603.12201).
        head_gate: each head's results are multiplied by the sigmoid of a gate, which has a projection of its own.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits; a part of an indexer, or one without q_lora_rank.
    """

    kv_lora_rank: Annotated[int, Limits(1, 1 << 16)]
    qk_nope_head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    qk_rope_head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    v_head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    q_lora_rank: Annotated[int | None, Limits(1, 1 << 16)] = None
    index_n_heads: Annotated[int | None, Limits(1, 1 << 16, also="")] = None
    index_head_dim: int | None = None
    index_topk: Annotated[int | None, Limits(1, 1 << 24, also="")] = None
    rope_interleave: Flag = True
    index_rope_interleave: Flag = False
    index_shared_layers: tuple[int, ...] = ()
    head_gate: Flag = False

    def __post_init__(self) -> None:
        check_fields(self)
        names = ("index_n_heads", "index_head_dim", "index_topk")
        given = [name for name in names if getattr(self, name) is not None]
        if not given and not self.index_shared_layers:
            return
        if len(given) < len(names):
            raise InvalidInput(f"{', '.join(given) or 'none'} of {', '.join(names)} given; an indexer has all three.")
        if self.q_lora_rank is None:
            raise InvalidInput("q_lora_rank", value=None, wanted="an indexer's queries come from the compressed query")
        # The rest of a key is not rotated.
        check_int("index_head_dim", self.index_head_dim, self.qk_rope_head_dim + 1, MAX_HEAD_DIM)

    def check(self, head_dim: int, num_hidden_layers: int, scaling: RopeScaling | None) -> None:
        """Raises InvalidInput or Unsupported unless a model's heads, layers and scaled frequencies fit."""
        if head_dim != self.qk_rope_head_dim:
            wanted = f"with latents it is qk_rope_head_dim ({self.qk_rope_head_dim})"
            raise InvalidInput("head_dim", value=head_dim, wanted=wanted)
        for index, layer in enumerate(self.index_shared_layers):
            check_int(f"latent.index_shared_layers[{index}]", layer, 1, num_hidden_layers - 1)
        if scaling is not None and scaling.rope_type == "yarn":
            for name, value in {"attention_factor": None, "truncate": True}.items():
                if (found := getattr(scaling, name)) != value:
                    raise Unsupported(f"rope_scaling.{name}", value=found, wanted=f"attention over latents has {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionConfig:
    """The sizes of attention in layers without a window, where those with a window have others (Gemma 4, Laguna).

    Attributes:
        head_dim: elements of one head.
        num_key_value_heads: key/value heads.
        num_attention_heads: query heads; None for as many as elsewhere.
        attention_k_eq_v: as in `ModelConfig`.
        partial_rotary_factor: share of a head's elements that are rotated; None for the same as elsewhere.
        attention_sinks: every head has a sink; None for the same as elsewhere.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    num_key_value_heads: Annotated[int, Limits(1, 1024)]
    num_attention_heads: Annotated[int | None, Limits(1, 1024)] = None
    attention_k_eq_v: Flag = False
    partial_rotary_factor: Annotated[float | None, Limits(1e-3, 1.0)] = None
    attention_sinks: Annotated[bool | None, Limits(wanted="true, false or None")] = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="full_attention.")

    def check(self, num_attention_heads: int, partial_rotary_factor: float) -> None:
        """Raises InvalidInput unless the sizes fit a model's number of query heads and the rotated share of a head."""
        own = self.num_attention_heads or num_attention_heads
        if own % self.num_key_value_heads:
            wanted = f"it must divide num_attention_heads ({own})"
            raise InvalidInput("full_attention.num_key_value_heads", value=self.num_key_value_heads, wanted=wanted)
        if int(self.head_dim * (self.partial_rotary_factor or partial_rotary_factor)) % 2:
            wanted = "rotary embeddings need an even number"
            raise InvalidInput("full_attention.head_dim", value=self.head_dim, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHeadConfig:
    """Values with other heads than keys, projected apart from them (MiMo-V2). In the cache zeros follow a value.

    Attributes:
        head_dim: elements of a value head; the head_dim of keys at most.
        scale: factor of the values.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    scale: Factor = 1.0

    def __post_init__(self) -> None:
        check_fields(self, prefix="value_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputConfig:
    """A further input of each layer, from the token and its embedding (Gemma 3n and 4).

    Attributes:
        hidden_size: elements of it in one layer.
        vocab_size: rows of its embedding.
        num_layers: layers of the model.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    hidden_size: Annotated[int, Limits(1, 1 << 16)]
    vocab_size: Annotated[int, Limits(1, 1 << 20)]
    num_layers: Annotated[int, Limits(1, 512)]

    def __post_init__(self) -> None:
        check_fields(self, prefix="per_layer_input.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureConfig:
    """A factor of the queries that grows with their position p: `1 + beta * log(1 + floor((p + offset) / interval))`.

    It keeps attention over long contexts from flattening (Llama 4).

    Attributes:
        beta: weight of the logarithm.
        interval: number of positions with the same factor.
        offset: number that is added to a position.
        without_rope: only in layers without rotary embedding.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    beta: Annotated[float, Limits(0.0, 1e3)]
    interval: Annotated[int, Limits(1, MAX_CONTEXT)]
    offset: Annotated[int, Limits(0, 1)] = 0
    without_rope: Flag = False

    def __post_init__(self) -> None:
        check_fields(self, prefix="temperature.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The scaling of rotary frequencies, as in transformers' types of the same names.

    Attributes:
        rope_type: "linear" divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595); "llama3" divides
            only the slow ones and blends in between (Llama 3.1); "yarn" likewise, by numbers of rotations, and scales
            the attention (Peng et al. 2023, arXiv:2309.00071); "longrope" divides each by a factor of its own (Ding et
            al. 2024, arXiv:2402.13753); "dynamic" changes nothing within max_position_embeddings; "proportional" stops
            the slow ones, from a share of the pairs on (Gemma 4).
        factor: how many times longer the context becomes; at least 1.
        low_freq_factor: llama3 only; wavelengths above original_max_position_embeddings / this are divided fully.
        high_freq_factor: llama3 only; wavelengths below original_max_position_embeddings / this are kept.
        original_max_position_embeddings: the context of the first training, in tokens.
        attention_factor: yarn and longrope; factor of cosine and sine. None for the paper's value, derived from
            `factor`.
        beta_fast: yarn only; frequencies with more rotations within the first context are kept.
        beta_slow: yarn only; those with fewer are divided fully.
        truncate: yarn only; the two bounds are whole numbers of pairs.
        mscale, mscale_all_dim: yarn only; weights of the value derived from `factor`, for cosine and sine and for the
            scores of attention over latents (DeepSeek-V2, arXiv:2405.04434). None for the paper's.
        short_factor: longrope only; for each pair of elements, of models whose context is the original one.
        long_factor: longrope only; likewise of models with a longer context.
        partial_rotary_factor: proportional only; the share of the pairs that rotate.

    Raises:
        InvalidInput: a number is out of its range.
        Unsupported: another rope_type.
    """

    rope_type: str
    factor: Annotated[float, Limits(1.0, 1e6)]
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_position_embeddings: Annotated[int, Limits(2, MAX_CONTEXT)] = 8192
    attention_factor: Factor | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    truncate: Flag = True
    mscale: Annotated[float | None, Limits(0.0, 1e6)] = None
    mscale_all_dim: Annotated[float | None, Limits(0.0, 1e6)] = None
    short_factor: tuple[Factor, ...] = ()
    long_factor: tuple[Factor, ...] = ()
    partial_rotary_factor: Annotated[float, Limits(1e-3, 1.0)] = 1.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_KEYS:
            raise Unsupported("rope_type", value=self.rope_type, wanted=f"this build has {', '.join(ROPE_KEYS)}")
        check_fields(self, prefix="rope_scaling.")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            wanted = f"it must be greater than low_freq_factor ({self.low_freq_factor})"
            raise InvalidInput("rope_scaling.high_freq_factor", value=self.high_freq_factor, wanted=wanted)

    def check_rotary_dim(self, rotary_dim: int) -> None:
        """Raises InvalidInput unless a longrope has a factor for each pair of `rotary_dim` elements."""
        for name in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            if (count := len(getattr(self, name))) != rotary_dim // 2:
                wanted = f"it must have {rotary_dim // 2}, one for each rotated pair"
                raise InvalidInput(f"rope_scaling.{name}", f"has {count} entries", wanted)


def last_of_each_window(windows: Sequence[int | None], num_kv_shared_layers: int) -> tuple[int | None, ...]:
    """Returns `ModelConfig.kv_sharing_targets` of a model whose last layers share, as Gemma 3n's do.

    Each of them reads the keys and values of the last layer of its window that has some.

    Args:
        windows: windows of each layer; None for all.
        num_kv_shared_layers: the last layers, which have no keys and values of their own.

    Raises:
        InvalidInput: no layer with the same window is left, or there are fewer layers.

    Example:
        >>> last_of_each_window([8, 8, None, 8, 8, None], 3)
        (None, None, None, 1, 1, 2)
    """
    check_int("num_kv_shared_layers", num_kv_shared_layers, 0, len(windows))
    own = len(windows) - num_kv_shared_layers
    last = {window: layer for layer, window in enumerate(windows[:own])}
    for layer, window in enumerate(windows[own:], own):
        if window not in last:
            wanted = f"layer {layer} has the window {window}, and none of the {own} layers with keys and values has"
            raise InvalidInput("num_kv_shared_layers", value=num_kv_shared_layers, wanted=wanted)
    return (*[None] * own, *(last[window] for window in windows[own:]))
