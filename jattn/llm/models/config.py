"""ModelConfig: the shape and the options of one decoder-only language model, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeAlias

from jattn.llm.models.mixers import (
    MIXERS,
    STATE_CONFIGS,
    DeltaNetConfig,
    KimiDeltaConfig,
    LayerType,
    LightningConfig,
    MambaConfig,
    ShortConvConfig,
)
from jattn.llm.models.parts import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_INNER,
    Flag,
    FullAttentionConfig,
    LatentConfig,
    MoEConfig,
    PerLayerInputConfig,
    RopeScaling,
    TemperatureConfig,
    ValueHeadConfig,
)
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Choices, Limits, check_fields
from torch_core.base.specs import QUERY_DTYPES

_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
Activation: TypeAlias = Annotated[str, Choices(*_ACTIVATIONS, "swigluoai", "xielu", error=Unsupported)]
Scalar: TypeAlias = Annotated[float, Limits(1e-6, 1e6)]
Theta: TypeAlias = Annotated[float, Limits(1.0, 1e12)]
Window: TypeAlias = Annotated[int | None, Limits(1, MAX_CONTEXT, also="")]
#: Options that attention over latents does not have, and their values where they are off.
_NOT_LATENT = {
    "qk_norm": None,
    "clip_qkv": None,
    "attention_chunk_size": None,
    "rope_local_theta": None,
    "partial_rotary_factor": 1.0,
    "nope_layers": (),
    "attention_scale": None,
    "attn_logit_softcapping": None,
    "attention_sinks": False,
    "attn_output_gate": False,
    "attn_head_gate": False,
    "is_encoder": False,
    "sliding_window": None,
    "layer_windows": (),
    "encoder": None,
    "kv_sharing_targets": (),
    "full_attention": None,
    "value_norm": False,
    "value_head": None,
    "attention_k_eq_v": False,
}
_OF_FULL_ATTENTION = tuple(each.name for each in fields(FullAttentionConfig))
#: The fields that an encoder and its decoder share: one vocabulary, one width, and a cache for both.
_SHARED_WITH_ENCODER = ("vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "embedding_multiplier", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that decides the shapes and the arithmetic of a decoder; names are Hugging Face's if it has one.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; divides num_attention_heads.
        head_dim: elements of one head; of its rotated part if attention is over latents.
        max_position_embeddings: the longest sequence that the model is meant for, in tokens.
        norm_type: "rms_norm" rounds to the model's dtype before its weight, "rms_norm_wide" after it; "gemma_rms_norm"
            multiplies by 1 + weight; "layer_norm", "layer_norm_1p" with 1 + weight.
        norm_bias: a layer norm has a bias.
        norm_placement: place of the norms of each branch: "before" it, "after" it, "both", or "residual" (after the
            branch was added to the residual stream), or "stream" (before it; the branch is added to what it read).
        state_norm_placement: the same in layers whose mixers all keep a state, if it differs there: "before"; None for
            no difference.
        rms_norm_eps: added to the mean square, or to the variance, before its root.
        qk_norm: norm of queries and keys before they are rotated: over each "head" with one weight for all heads
            ("per_head": a weight for each), or over "all" heads at once; "unweighted" over each head of layers with
            rotary embedding, without a weight; None for none.
        qk_norm_bias: these norms have a bias, if they are layer norms.
        qk_norm_after_rotation: they come after the rotation.
        value_norm: values are divided by their root mean square, without a weight.
        value_head: sizes of value heads, if they differ from those of keys.
        attention_k_eq_v: values are the keys as they are projected, before their norm and rotation.
        clip_qkv: largest absolute value of queries, keys and values, after their norms; None for no limit.
        parallel_block: attention and feed-forward both read the layer's input, after one norm ("shared_norm") or
            one each ("two_norms"); None for one after the other.
        hidden_act: activation of the feed-forward layer; "xielu" has parameters of its own (Huang and Schlag 2024,
            arXiv:2411.13010).
        gated_mlp: the activation gates a second projection.
        moe: experts instead of the feed-forward layer.
        double_wide_mlp: the feed-forward part is twice as wide in layers that read another layer's keys and values.
        latent: attention over latents instead of keys and values of each head.
        full_attention: sizes of attention in layers without a window, if they differ there.
        per_layer_input: a further input of each layer; None for none.
        layer_scalar: the output of each layer is multiplied by a number of its own.
        layer_types: how each layer mixes tokens, a key of `jattn.llm.models.mixers.MIXERS`: "attention", or with a
            state between tokens "conv", "linear_attention", "lightning_attention" or "kimi_delta_attention"; empty for
            attention in all.
        short_conv: sizes of the short convolution of "conv".
        delta_net: sizes of the gated delta rule of "linear_attention".
        kimi_delta: sizes of "kimi_delta_attention".
        lightning: sizes of "lightning_attention".
        mamba: sizes of "mamba" and "attention_mamba".
        single_branch: a layer has mixers or, of type "feed_forward", a feed-forward part; not both.
        position_embedding: "rope", "learned" (added to the embedding), "alibi" (added to the scores), "relative"
            (learned, added to the scores by the bucket of a distance; Raffel et al. 2020, arXiv:1910.10683) or "none".
        position_offset: rows of a learned table before that of the first position.
        relative_attention_num_buckets: number of buckets of "relative", in both directions together if tokens see later
            ones.
        relative_attention_max_distance: largest distance of "relative"; all distances from here on have one bucket.
        alibi_scale: factor of ALiBi's slopes.
        rope_theta: base of the rotary frequencies.
        rope_local_theta: base in layers with a window, without scaling; None for the same in all.
        rope_scaling: None for the default frequencies.
        partial_rotary_factor: share of a head's elements that are rotated, the first ones.
        nope_layers: indices of layers without rotary embedding.
        token_types: rows of an embedding of token types, of which the first is added to all tokens; 0 for none.
        embedding_norm: a norm after the embedding.
        embedding_multiplier: factor of the embedding, in the model's dtype.
        residual_multiplier: factor of each branch before it is added.
        stream_multiplier: factor of the residual stream before a branch is added.
        logits_scale: factor of the logits.
        attention_multipliers: factors of the input and the output of attention.
        mlp_multipliers: factors of the activation's argument and of the feed-forward part's output.
        temperature: a factor of the queries by their position; None for none.
        attention_scale: factor of the attention scores; None for head_dim ** -0.5.
        attn_logit_softcapping: cap on the attention scores, cap * tanh(score / cap); None for none.
        final_logit_softcapping: cap on the logits; None for none.
        attention_sinks: whether every head has a sink, a logit without a value in its softmax.
        attn_output_gate: attention's results are multiplied by a gate of each element, projected with the queries.
        attn_head_gate: they are multiplied by a gate for each head, which has a projection of its own.
        attn_gate_act: activation of these gates.
        is_encoder: every token sees every other; there is no output projection and no cache of its own.
        num_labels: labels that an encoder scores a text with; 0 for none.
        label_pooling: what it scores: the hidden states of the first token ("cls"), or the "mean" of all.
        pooler_act, pooler_bias, pooler_norm: the layer before the labels has this activation (or "tanh"), a bias, and a
            norm after it.
        label_activation: what makes a score of one label's logit: "sigmoid" or "identity".
        first_layer_norm: the first layer has a norm before its attention, as the others have.
        final_norm: there is a norm after the last layer.
        encoder: the encoder that each layer's cross attention (after the self-attention) reads; it has the same
            embedding. None for a model without.
        decoder_start_token_id: the token that every generation starts with, in a model with an encoder.
        forced_bos_token_id: the token that always follows it; None for none.
        forced_eos_token_id: the last token of a text of the largest length; None for none.
        logits_bias: the logits have a bias.
        lm_head_bias: the output projection has one.
        tie_word_embeddings: the output projection is the embedding.
        attention_bias: the query, key and value projections have a bias.
        attention_output_bias: the output projection of attention has one.
        mlp_bias: the feed-forward projections have one.
        sliding_window: number of tokens that a query sees in every layer, including its own; None for all.
        attention_chunk_size: tokens of a chunk, of which a query sees its own alone, in layers with rotary embedding;
            None for all.
        layer_windows: window of each layer, if layers differ; empty otherwise.
        kv_sharing_targets: for each layer, the index of the earlier layer whose keys and values it reads, or None if it
            has its own; empty if no layer shares. `last_of_each_window` is Gemma 3n's pattern.
        dtype: dtype of the parameters and the computation, by name: float32, bfloat16 or float16.
        bos_token_id: the token that starts a document, or None.
        eos_token_ids: the tokens that end a generation.
        architecture: the family that the config was read as, which `save_model` writes again; it is not compared.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
        Unsupported: an option has an unknown name.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> config.query_size, config.key_value_size
        (64, 32)
    """

    # The upper limits of sizes are far above any published model, and far below what would exhaust memory in planning.
    vocab_size: Annotated[int, Limits(1, 1 << 20)]
    hidden_size: Annotated[int, Limits(1, 1 << 16)]
    intermediate_size: Annotated[int, Limits(1, MAX_INNER)]
    num_hidden_layers: Annotated[int, Limits(1, 512)]
    num_attention_heads: Annotated[int, Limits(1, 1024)]
    num_key_value_heads: Annotated[int, Limits(1, 1024)]
    head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    max_position_embeddings: Annotated[int, Limits(1, MAX_CONTEXT)] = 2048
    norm_type: Annotated[
        str, Choices("rms_norm", "rms_norm_wide", "gemma_rms_norm", "layer_norm", "layer_norm_1p", error=Unsupported)
    ] = "rms_norm"
    norm_bias: Flag = False
    norm_placement: Annotated[str, Choices("before", "after", "both", "residual", "stream", error=Unsupported)] = (
        "before"
    )
    state_norm_placement: Annotated[str | None, Choices(None, "before", error=Unsupported)] = None
    rms_norm_eps: Annotated[float, Limits(1e-12, 1.0)] = 1e-6
    qk_norm: Annotated[str | None, Choices(None, "head", "per_head", "all", "unweighted", error=Unsupported)] = None
    qk_norm_bias: Flag = False
    qk_norm_after_rotation: Flag = False
    value_norm: Flag = False
    value_head: ValueHeadConfig | None = None
    attention_k_eq_v: Flag = False
    clip_qkv: Scalar | None = None
    parallel_block: Annotated[str | None, Choices(None, "shared_norm", "two_norms", error=Unsupported)] = None
    hidden_act: Activation = "silu"
    gated_mlp: Flag = True
    moe: MoEConfig | None = None
    double_wide_mlp: Flag = False
    latent: LatentConfig | None = None
    full_attention: FullAttentionConfig | None = None
    per_layer_input: PerLayerInputConfig | None = None
    layer_scalar: Flag = False
    layer_types: tuple[LayerType, ...] = ()
    short_conv: ShortConvConfig | None = None
    delta_net: DeltaNetConfig | None = None
    kimi_delta: KimiDeltaConfig | None = None
    lightning: LightningConfig | None = None
    mamba: MambaConfig | None = None
    single_branch: Flag = False
    position_embedding: Annotated[str, Choices("rope", "learned", "alibi", "relative", "none", error=Unsupported)] = (
        "rope"
    )
    position_offset: Annotated[int, Limits(0, 1 << 16)] = 0
    relative_attention_num_buckets: Annotated[int, Limits(4, 1 << 16)] = 32
    relative_attention_max_distance: int = 128
    alibi_scale: Scalar = 1.0
    rope_theta: Theta = 10000.0
    rope_local_theta: Theta | None = None
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: Annotated[float, Limits(1e-3, 1.0)] = 1.0
    nope_layers: tuple[int, ...] = ()
    token_types: Annotated[int, Limits(0, 1 << 16)] = 0
    embedding_norm: Flag = False
    embedding_multiplier: Scalar = 1.0
    residual_multiplier: Scalar = 1.0
    stream_multiplier: Scalar = 1.0
    logits_scale: Scalar = 1.0
    attention_multipliers: tuple[Scalar, Scalar] = (1.0, 1.0)
    mlp_multipliers: tuple[Scalar, Scalar] = (1.0, 1.0)
    temperature: TemperatureConfig | None = None
    attention_scale: Scalar | None = None
    attn_logit_softcapping: Scalar | None = None
    final_logit_softcapping: Scalar | None = None
    attention_sinks: Flag = False
    attn_output_gate: Flag = False
    attn_head_gate: Flag = False
    attn_gate_act: Annotated[str, Choices("sigmoid", "softplus", error=Unsupported)] = "sigmoid"
    is_encoder: Flag = False
    num_labels: Annotated[int, Limits(0, 1 << 16)] = 0
    label_pooling: Annotated[str, Choices("cls", "mean", error=Unsupported)] = "cls"
    pooler_act: Annotated[str, Choices("tanh", *_ACTIVATIONS, error=Unsupported)] = "tanh"
    pooler_bias: Flag = True
    pooler_norm: Flag = False
    label_activation: Annotated[str, Choices("sigmoid", "identity", error=Unsupported)] = "sigmoid"
    first_layer_norm: Flag = True
    final_norm: Flag = True
    encoder: Annotated[ModelConfig | None, Limits(wanted="a ModelConfig with is_encoder, or None")] = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    logits_bias: Flag = False
    lm_head_bias: Flag = False
    tie_word_embeddings: Flag = False
    attention_bias: Flag = False
    attention_output_bias: Flag = False
    mlp_bias: Flag = False
    sliding_window: Window = None
    attention_chunk_size: Window = None
    layer_windows: tuple[Window, ...] = ()
    kv_sharing_targets: tuple[int | None, ...] = ()
    dtype: Annotated[str, Choices(*QUERY_DTYPES)] = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            wanted = f"it must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            raise InvalidInput("num_attention_heads", value=self.num_attention_heads, wanted=wanted)
        self._check_positions()
        self._check_layers()
        self._check_mixers()
        if self.hidden_act == "xielu" and (self.gated_mlp or self.moe is not None):
            raise Unsupported("hidden_act", value="xielu", wanted="it gates nothing, and no experts have it")
        if self.lm_head_bias and self.tie_word_embeddings:
            raise Unsupported("lm_head_bias", value=True, wanted="a head that is the embedding has none")
        self._check_latent()
        self._check_layer_sizes()
        self._check_encoder()
        self._check_tokens()

    def _check_positions(self) -> None:
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        check_int("relative_attention_max_distance", distance, buckets, MAX_CONTEXT)
        if self.position_embedding == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            which = "head_dim" if self.partial_rotary_factor == 1 else "head_dim * partial_rotary_factor"
            raise InvalidInput(which, value=self.rotary_dim, wanted="rotary embeddings need an even number")
        if self.rope_scaling is not None:
            self.rope_scaling.check_rotary_dim(self.rotary_dim)

    def _check_layers(self) -> None:
        for name in ("layer_windows", "kv_sharing_targets", "layer_types"):
            if (count := len(getattr(self, name))) not in (0, self.num_hidden_layers):
                wanted = f"it must have one for each of the {self.num_hidden_layers} layers, or none"
                raise InvalidInput(name, f"has {count} entries", wanted)
        if self.layer_windows and self.sliding_window is not None:
            wanted = "the first is for all layers, the second where they differ: leave one out"
            raise InvalidInput("sliding_window", f"is {self.sliding_window} and layer_windows is given", wanted)
        targets = self.kv_sharing_targets
        if targets and self.is_encoder:
            problem = "is given and is_encoder is True"
            raise Unsupported("kv_sharing_targets", problem, "layers of an encoder share nothing")
        for layer, target in enumerate(targets):
            if target is None:
                continue
            name = f"kv_sharing_targets[{layer}]"
            check_int(name, target, 0, layer - 1, also=", or None")
            if targets[target] is not None:
                problem = f"is {target}, which has no keys and values of its own"
                raise InvalidInput(name, problem, "name the layer that has")
            own, window = self.window_of(layer), self.window_of(target)
            if own != window:
                wanted = f"layer {layer} has {own}. Layers that share keys and values keep the same part of the past"
                raise InvalidInput(name, f"is {target}, whose window is {window}", wanted)

    def _check_mixers(self) -> None:
        for layer, kind in enumerate(self.layer_types):
            name = f"layer_types[{layer}]"
            for mixer in MIXERS[kind]:
                part = STATE_CONFIGS.get(mixer)
                if part is not None and getattr(self, part) is None:
                    raise InvalidInput(name, f"is {kind!r} and {part} None", f"give {part}, the sizes of such a layer")
            if self.layer_windows and not self.attends(layer) and self.window_of(layer) is not None:
                problem = f"is {self.window_of(layer)} and {name} {kind!r}"
                raise InvalidInput(f"layer_windows[{layer}]", problem, "a layer without attention has None")
            if not self.attends(layer) and (
                layer in self.kv_sharing_targets or self.kv_sharing_target(layer) is not None
            ):
                wanted = "a layer without attention has no cache to share"
                raise InvalidInput("kv_sharing_targets", f"name layer {layer}, which is {kind!r}", wanted)
            if (kind == "feed_forward") > self.single_branch:
                raise InvalidInput(name, f"is {kind!r} and single_branch False", "a layer has a mixer then")
        if self.single_branch and (not self.layer_types or self.parallel_block or self.norm_placement != "before"):
            wanted = "such layers have layer_types and a norm before them"
            raise Unsupported("single_branch", value=True, wanted=wanted)
        if self.norm_placement == "stream" and self.parallel_block is not None:
            wanted = "norms of the residual stream stand between two branches"
            raise Unsupported("parallel_block", value=self.parallel_block, wanted=wanted)
        if self.has_states and (self.is_encoder or self.encoder is not None):
            raise Unsupported("layer_types", value=self.layer_types, wanted="encoders and their decoders attend")
        if self.layer_types and not self.cache_layers:
            raise Unsupported("layer_types", value=self.layer_types, wanted="a layer of this build's decoders attends")

    def _check_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        latent.check(self.head_dim, self.num_hidden_layers, self.rope_scaling)
        same = {"num_key_value_heads": self.num_attention_heads, "attention_output_bias": self.attention_bias}
        if self.position_embedding not in ("rope", "none"):
            wanted = "attention over latents has 'rope' or 'none'"
            raise Unsupported("position_embedding", value=self.position_embedding, wanted=wanted)
        for name, value in (_NOT_LATENT | same).items():
            if (found := getattr(self, name)) != value:
                raise Unsupported(name, value=found, wanted=f"attention over latents has {value!r}")

    def _check_layer_sizes(self) -> None:
        full, given = self.full_attention, self.per_layer_input
        if full is not None:
            full.check(self.num_attention_heads, self.partial_rotary_factor)
        if self.value_head is not None and (self.attention_k_eq_v or self.value_head.head_dim > self.head_dim):
            raise Unsupported("value_head", value=self.value_head, wanted=f"it has head_dim ({self.head_dim}) at most")
        if self.attn_output_gate and self.attn_head_gate:
            raise InvalidInput("attn_head_gate", "is True and attn_output_gate too", "give one of them")
        if given is not None and given.num_layers < self.num_hidden_layers:
            wanted = f"it must have one for each of the {self.num_hidden_layers} layers"
            raise InvalidInput("per_layer_input.num_layers", value=given.num_layers, wanted=wanted)
        parts = {"full_attention": full, "per_layer_input": given, "layer_scalar": self.layer_scalar or None}
        for name in (name for name, part in parts.items() if part is not None):
            if self.is_encoder or self.encoder is not None or self.single_branch:
                raise Unsupported(name, "is given", "it is for decoders whose layers attend")
        if self.moe is not None and self.moe.with_mlp and self.norm_placement != "both":
            raise Unsupported("moe.with_mlp", value=True, wanted="norm_placement is 'both' then")

    def _check_encoder(self) -> None:
        encoder = self.encoder
        if self.num_labels and not self.is_encoder:
            raise Unsupported("num_labels", value=self.num_labels, wanted="only an encoder has labels in this build")
        if encoder is None:
            return
        if not encoder.is_encoder:
            raise InvalidInput("encoder", value=encoder, wanted="it must be a ModelConfig with is_encoder, or None")
        if self.is_encoder or self.decoder_start_token_id is None:
            wanted = "the model that reads it is no encoder itself and has a decoder_start_token_id"
            raise InvalidInput("encoder", "is given", wanted)
        for name in _SHARED_WITH_ENCODER:
            if (theirs := getattr(encoder, name)) != getattr(self, name):
                problem = f"is {shown(theirs)} and the decoder's {getattr(self, name)}"
                raise Unsupported(f"encoder.{name}", problem, "this build has the same in both")
        if self.parallel_block is not None or self.norm_placement not in ("before", "residual"):
            problem = f"is {self.parallel_block!r} and norm_placement {self.norm_placement!r}"
            wanted = "with an encoder this build has None, and 'before' or 'residual'"
            raise Unsupported("parallel_block", problem, wanted)

    def _check_tokens(self) -> None:
        single = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
        named = [(name, getattr(self, name)) for name in single if getattr(self, name) is not None]
        named += [(f"eos_token_ids[{index}]", token) for index, token in enumerate(self.eos_token_ids)]
        for name, token in named:
            if not 0 <= token < self.vocab_size:
                raise InvalidInput(name, value=token, wanted=f"it must be a token id from 0 to {self.vocab_size - 1}")

    @property
    def index_head_dim(self) -> int | None:
        """Elements of a token's index key, of attention over latents that an indexer chooses; None of all other."""
        return None if self.latent is None else self.latent.index_head_dim

    @property
    def index_layers(self) -> tuple[int, ...]:
        """The layers that have an indexer, in order."""
        shared = () if self.latent is None else self.latent.index_shared_layers
        return () if self.index_head_dim is None else tuple(each for each in self.cache_layers if each not in shared)

    @property
    def query_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of all key heads (or all value heads) of one token."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def of_layer(self, layer: int) -> ModelConfig:
        """Returns the config with this layer's own sizes of attention and feed-forward part."""
        own: dict[str, Any] = {}
        if self.full_attention is not None:
            own["full_attention"] = None
            if self.window_of(layer) is None:
                given = {name: getattr(self.full_attention, name) for name in _OF_FULL_ATTENTION}
                own |= {name: value for name, value in given.items() if value is not None}
        if self.double_wide_mlp:
            width = self.intermediate_size * (1 + (self.kv_sharing_target(layer) is not None))
            own |= {"double_wide_mlp": False, "intermediate_size": width}
        return replace(self, **own) if own else self

    def window_of(self, layer: int) -> int | None:
        """Returns the tokens that a query of this layer sees, its own included; None for all."""
        return self.layer_windows[layer] if self.layer_windows else self.sliding_window

    def kv_sharing_target(self, layer: int) -> int | None:
        """Returns the layer whose keys and values this one reads; None if it has its own."""
        return self.kv_sharing_targets[layer] if self.kv_sharing_targets else None

    def mixers(self, layer: int) -> tuple[str, ...]:
        """Returns the names of this layer's modules that mix tokens."""
        return MIXERS[self.layer_types[layer] if self.layer_types else "attention"]

    def attends(self, layer: int) -> bool:
        """Returns whether this layer has attention."""
        return "self_attn" in self.mixers(layer)

    def norm_placement_of(self, layer: int) -> str:
        """Returns the place of this layer's norms."""
        return (not self.attends(layer) and self.state_norm_placement) or self.norm_placement

    @property
    def has_states(self) -> bool:
        """Some layers keep a state between tokens."""
        return any(mixer in STATE_CONFIGS for kind in self.layer_types for mixer in MIXERS[kind])

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The layers that have a cache of blocks, in order."""
        layers = range(self.num_hidden_layers)
        return tuple(layer for layer in layers if self.attends(layer) and self.kv_sharing_target(layer) is None)

    def cache_of(self, layer: int) -> int:
        """Returns which of the caches, in the order of `cache_layers`, a layer reads."""
        target = self.kv_sharing_target(layer)
        return self.cache_layers.index(layer if target is None else target)

    def is_sparse(self, layer: int) -> bool:
        """Returns whether this layer has experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
