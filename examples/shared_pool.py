"""One pool, two frameworks: a torch model and a JAX model compute the same sequences over the same blocks.

JAX owns the cache arrays and donates them to its own steps. A torch step gets views of them, which must be dropped
before the next JAX step. One allocator assigns the blocks, so each framework finds prefixes that the other computed.

    python -m examples.shared_pool
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from examples.torch_decode import BLOCK_SIZE, TorchDecoder
from jattn import AttentionMetadata, KVCacheSpec, KVPool, load_model
from jattn.llm.load import embedded_model_folder, load_tokenizer
from torch_core.cache import CacheConfig, CacheManager, CommittedStep
from torch_core.metadata import CommonAttentionMetadata, build_common_metadata
from torch_core.vllm import BuilderConfig, upload


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def jax_step(kv_caches, model_of, leaves, token_ids, positions, metadata):
    """Computes a step's tokens in JAX and returns the next token of each row."""
    model = model_of(leaves)
    # On a GPU XLA rounds float32 products to TF32 unless told otherwise; torch does not.
    with jax.default_matmul_precision("highest"):
        hidden, kv_caches = model(token_ids, positions, kv_caches, metadata)
        logits = model.logits(hidden[metadata.query_start_loc[1:] - 1])
    return jnp.argmax(logits, -1).astype(jnp.int32), kv_caches


class SharedPool:
    """A Flax and a torch decoder with the same weights, over one pool and one allocator."""

    def __init__(self, folder: Path, *, num_blocks: int = 64) -> None:
        model, config, _ = load_model(folder, dtype="float32", with_tokenizer=False)
        graph, self.leaves = nnx.split(model)
        self.model_of = functools.partial(nnx.merge, graph)
        spec = KVCacheSpec(
            num_kv_heads=config.num_key_value_heads, head_size=config.head_dim, block_size=BLOCK_SIZE, dtype="float32"
        )
        self.pool = KVPool(spec, num_layers=config.num_hidden_layers, num_blocks=num_blocks)
        self.manager = CacheManager(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
        self.device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
        self.torch_model = TorchDecoder(folder, self.device, torch.float32)
        names = [f"layer.{index}" for index in range(config.num_hidden_layers)]
        builder_cls = self.torch_model.backend.get_builder_cls()
        self.builder = builder_cls(spec, names, BuilderConfig(num_heads=self.torch_model.num_heads), self.device)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, *, prefill: str, decode: str
    ) -> tuple[list[list[int]], list[int]]:
        """Returns the greedy tokens of each prompt, and the number of its tokens in a cached prefix.

        Args:
            prompts: token ids of each prompt.
            max_tokens: number of new tokens of each prompt.
            prefill: framework that computes the prompts, "torch" or "jax".
            decode: framework that computes the new tokens.
        """
        run = {"torch": self.run_torch, "jax": self.run_jax}
        seq_ids = [str(index) for index in range(len(prompts))]
        cached = [self.manager.add(seq_id, prompt) for seq_id, prompt in zip(seq_ids, prompts, strict=True)]
        inputs = [prompt[count:] for prompt, count in zip(prompts, cached, strict=True)]
        tokens: list[list[int]] = [[] for _ in prompts]
        for step in range(max_tokens):
            work = [(seq_id, len(row)) for seq_id, row in zip(seq_ids, inputs, strict=True)]
            committed = self.manager.step(work)
            sampled = run[prefill if step == 0 else decode](committed, inputs)
            for seq_id, row, token in zip(seq_ids, tokens, sampled, strict=True):
                row.append(token)
                self.manager.append_tokens(seq_id, [token])
            self.manager.retire(committed.step_id)
            inputs = [[token] for token in sampled]
        for seq_id in seq_ids:
            self.manager.finish(seq_id)
        return tokens, cached

    def run_jax(self, committed: CommittedStep, inputs: list[list[int]]) -> list[int]:
        """Runs a step in JAX: the pool is donated and comes back at the same address."""
        common, token_ids = self.build(committed, inputs)
        metadata = AttentionMetadata.from_common(common)
        positions = jnp.asarray(common.positions)
        return self.pool.run(jax_step, self.model_of, self.leaves, token_ids, positions, metadata).tolist()

    @torch.inference_mode()
    def run_torch(self, committed: CommittedStep, inputs: list[list[int]]) -> list[int]:
        """Runs a step in torch, on views of the pool that do not outlive it."""
        common, token_ids = self.build(committed, inputs)
        arrays = upload(common, self.device)
        metadata = self.builder.build(0, common, arrays=arrays)
        views = self.pool.as_torch()
        tokens = torch.from_numpy(token_ids).to(self.device)
        hidden = self.torch_model(tokens, arrays["positions"], list(views), metadata)
        sampled = self.torch_model.next_tokens(hidden[arrays["query_start_loc"][1:] - 1]).tolist()
        del views
        return sampled

    def build(self, committed: CommittedStep, inputs: list[list[int]]) -> tuple[CommonAttentionMetadata, np.ndarray]:
        """Returns a step's metadata and its packed tokens."""
        token_ids = np.array([token for row in inputs for token in row], np.int32)
        common = build_common_metadata(committed.rows, block_size=BLOCK_SIZE, num_blocks=self.pool.num_blocks)
        return common, token_ids


def main() -> None:
    """Computes prompts in one framework, continues them in the other, and shares the prefix between both."""
    folder = embedded_model_folder()
    tokenizer = load_tokenizer(folder)
    shared = SharedPool(folder)
    before = shared.pool.addresses()
    prompt = tokenizer.encode("The for statement is used to iterate over the elements of a sequence, such as a string")
    for prefill, decode in (("torch", "jax"), ("jax", "torch")):
        (tokens,), (cached,) = shared.generate([prompt], 24, prefill=prefill, decode=decode)
        text = tokenizer.decode(tokens)
        print(f"{prefill} prefills ({cached} of {len(prompt)} tokens found), {decode} decodes: {text!r}")
    print(f"the pool stayed in place: {shared.pool.addresses() == before}")


if __name__ == "__main__":
    main()
