"""A generation loop of your own: prefill once, then many greedy steps inside one `lax.scan`, all on the device.

Block tables are reserved for the whole generation, so the loop needs no host: slots follow from positions. The pool is
donated to both programs and stays at one address.

    python examples/jax_decode_loop.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn import AttentionMetadata, KVCacheSpec, KVPool, SequenceRow, load_model
from jattn.llm.load import embedded_model_folder

BLOCK_SIZE = 16
NEW_TOKENS = 24


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def prefill(kv_caches, model_of, leaves, token_ids, positions, metadata):
    """Computes the packed prompts and returns the first new token of each."""
    model = model_of(leaves)
    hidden, kv_caches = model(token_ids, positions, kv_caches, metadata)
    last = hidden[metadata.query_start_loc[1:] - 1]
    return jnp.argmax(model.logits(last), -1).astype(jnp.int32), kv_caches


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def decode(kv_caches, model_of, leaves, tokens, seq_lens, block_tables):
    """Runs NEW_TOKENS - 1 steps for the whole batch and returns int32[steps, sequences]."""
    model = model_of(leaves)
    batch = tokens.shape[0]

    def step(carry, _):
        kv_caches, tokens, seq_lens = carry
        blocks = jnp.take_along_axis(block_tables, (seq_lens // BLOCK_SIZE)[:, None], 1)[:, 0]
        metadata = AttentionMetadata(
            block_tables=block_tables,
            seq_lens=seq_lens + 1,
            query_start_loc=jnp.arange(batch + 1, dtype=jnp.int32),
            slot_mapping=blocks * BLOCK_SIZE + seq_lens % BLOCK_SIZE,
            max_query_len=1,
        )
        hidden, kv_caches = model(tokens, seq_lens, kv_caches, metadata)
        tokens = jnp.argmax(model.logits(hidden), -1).astype(jnp.int32)
        return (kv_caches, tokens, seq_lens + 1), tokens

    (kv_caches, _, _), new = jax.lax.scan(step, (kv_caches, tokens, seq_lens), None, length=NEW_TOKENS - 1)
    return new, kv_caches


def generate(prompts: list[list[int]], model, config) -> tuple[list[list[int]], bool]:
    """Returns the greedy tokens of each prompt, and whether the pool kept its address."""
    graph, state = nnx.split(model)
    model_of = functools.partial(nnx.merge, graph)
    longest = max(map(len, prompts)) + NEW_TOKENS
    columns = -(-longest // BLOCK_SIZE)
    spec = KVCacheSpec(
        num_kv_heads=config.num_key_value_heads, head_size=config.head_dim, block_size=BLOCK_SIZE, dtype=config.dtype
    )
    pool = KVPool(spec, num_layers=config.num_hidden_layers, num_blocks=1 + columns * len(prompts))
    tables = 1 + np.arange(columns * len(prompts), dtype=np.int32).reshape(len(prompts), columns)
    rows = [SequenceRow(table.tolist(), 0, len(prompt)) for table, prompt in zip(tables, prompts, strict=True)]
    metadata = AttentionMetadata.build(rows, block_size=BLOCK_SIZE, num_blocks=pool.num_blocks, max_blocks=columns)
    positions = np.concatenate([np.arange(len(prompt), dtype=np.int32) for prompt in prompts])
    token_ids = jnp.array([token for prompt in prompts for token in prompt], jnp.int32)
    before = pool.addresses()
    first = pool.run(prefill, model_of, state, token_ids, positions, metadata)
    rest = pool.run(decode, model_of, state, first, metadata.seq_lens, tables)
    tokens = jnp.concatenate([first[None], rest]).T.tolist()
    return tokens, pool.addresses() == before


def main() -> None:
    """Continues three prompts with the embedded model."""
    model, config, tokenizer = load_model(embedded_model_folder())
    if tokenizer is None:
        raise FileNotFoundError("the embedded model has lost its tokenizer.json")
    prompts = ["The for statement", "A class definition", "If the"]
    tokens, in_place = generate([tokenizer.encode(prompt) for prompt in prompts], model, config)
    for prompt, new in zip(prompts, tokens, strict=True):
        print(f"{prompt}{tokenizer.decode(new)}\n")
    print(f"the pool stayed in place: {in_place}")


if __name__ == "__main__":
    main()
