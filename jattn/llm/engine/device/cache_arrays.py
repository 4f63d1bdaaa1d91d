"""The cache arrays of an engine: the groups of layers that share them, their layouts, and their number of blocks."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.engine.options.config import MAX_SIZE, EngineConfig
from jattn.llm.models import PagedSpec
from jattn.pool import PoolPlan, plan_pool
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import CacheSpec
from torch_core.cache import LayerGroups, group_layers


def layer_groups(config: EngineConfig, shape: PagedSpec, draft: PagedSpec | None, max_model_len: int) -> LayerGroups:
    """Returns the cache groups of a model's layers.

    Args:
        config: sizes.
        shape: sizes of the model.
        draft: those of its draft model; None without.
        max_model_len: tokens of one sequence at most.
    """
    windows, widths = shape.windows, [heads * size for heads, size in shape.layer_heads]
    seen = {*windows, *(() if draft is None else draft.windows)}
    # A draft model reads the blocks of the one group that all layers are in then, and so does cross attention.
    alone = config.disable_hybrid_kv_cache_manager or draft is not None or shape.max_encoder_len
    # Blocks of as many bytes would end inside a token.
    alone = alone or any(max(widths) % width for width in widths)
    if len(seen) > 1 and alone:
        windows = (None if None in seen else max(filter(None, seen)),) * len(windows)
    # A window that no sequence outgrows hides nothing, and needs no group of its own.
    windows = [None if window is None or window >= max_model_len else window for window in windows]
    return group_layers(windows, widths, block_size=config.tokens_per_block)


def array_specs(shape: PagedSpec, layers: LayerGroups, block_size: int) -> list[CacheSpec]:
    """Returns the layout of each array: of its layer, or of the widest layers if groups of layers share arrays."""
    own: list[CacheSpec] = [*shape.cache_specs(block_size)]
    if len(layers.groups) == 1:
        return own
    return [max(own, key=lambda spec: spec.bytes_per_block)] * layers.num_arrays


def pool_plan(
    config: EngineConfig, specs: list[CacheSpec], layers: LayerGroups, num_bytes: int, *, max_model_len: int
) -> PoolPlan:
    """Returns the size of a pool of arrays of these layouts.

    Args:
        config: sizes; without num_blocks the pool fills the budget.
        specs: layout of each array, the model's first.
        layers: the cache groups.
        num_bytes: the budget.
        max_model_len: tokens of one sequence at most.

    Raises:
        InvalidInput: the budget holds no sequence, or slots are no int32.
    """
    spec, sizes = specs[0], layers.block_sizes(config.tokens_per_block)
    num_layers = next((index for index, each in enumerate(specs) if each != spec), len(specs))
    further, most = tuple(specs[num_layers:]), MAX_SIZE // max(sizes)
    if config.num_blocks is None:
        blocks_of_one = layers.most_blocks(
            max_model_len, block_size=config.tokens_per_block, max_step_tokens=config.max_num_batched_tokens
        )
        plan = plan_pool(
            spec,
            num_layers=num_layers,
            num_bytes=num_bytes,
            min_tokens=max_model_len,
            min_blocks=blocks_of_one,
            further=further,
        )
        enough = config.max_num_seqs * blocks_of_one + 1
        return replace(
            plan,
            num_blocks=min(plan.num_blocks, enough, most),
            group_block_sizes=sizes,
            context_parallel_size=config.decode_context_parallel_size,
        )
    if config.num_blocks > most:
        wanted = f"with blocks of {config.tokens_per_block} tokens it must be at most {most}, because slots are int32"
        raise InvalidInput("num_blocks", f"is {config.num_blocks}", wanted)
    return PoolPlan(
        spec=spec,
        num_layers=num_layers,
        num_blocks=config.num_blocks,
        further=further,
        group_block_sizes=sizes,
        context_parallel_size=config.decode_context_parallel_size,
    )
