"""A generation loop in torch: backend, metadata builder, block allocator and CUDA graphs, without JAX.

Prompts are computed eagerly; each decode step is one upload, one graph replay and one read of the sampled tokens. On
the CPU the graph is the function itself.

    python examples/torch_decode.py                    # the embedded model on the best device
    python examples/torch_decode.py --compare          # and the JAX engine on the same prompts
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from torch_core.base.specs import KVCacheSpec
from torch_core.cache import CacheConfig, CacheManager, CommittedStep
from torch_core.metadata import (
    BlockTableCache,
    Buckets,
    CommonAttentionMetadata,
    PackedLayout,
    SequenceRowLike,
    build_common_metadata,
    metadata_layout,
)
from torch_core.ops import copy_blocks
from torch_core.vllm import (
    AttentionImpl,
    AttentionScales,
    AttentionSelectorConfig,
    BuilderConfig,
    StepBuffers,
    StepGraphs,
    select_backend,
    upload,
)

BLOCK_SIZE = 16
EMBEDDED_MODEL = Path(__file__).parents[1] / "jattn" / "assets"


class TorchDecoder:
    """A Llama-format decoder whose attention is a backend's; plain functions over the file's own tensors."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        if self.config.get("rope_scaling") or self.config.get("attention_bias"):
            raise SystemExit("This example has the default rotary embedding and no biases.")
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        self.num_heads = self.config["num_attention_heads"]
        self.num_kv_heads = self.config["num_key_value_heads"]
        self.head_size = self.config.get("head_dim") or self.config["hidden_size"] // self.num_heads
        self.backend = select_backend(
            AttentionSelectorConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=dtype,
                block_size=BLOCK_SIZE,
            ),
            device,
        )
        make_impl = cast("type[AttentionImpl]", self.backend.get_impl_cls())
        self.attention = [
            make_impl(self.num_heads, self.head_size, self.head_size**-0.5, self.num_kv_heads)
            for _ in range(self.config["num_hidden_layers"])
        ]
        self.scales = AttentionScales.of(device=device)
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size
        self.frequencies = (self.config["rope_theta"] ** -exponents).to(device, torch.float32)

    def __call__(self, token_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: object) -> Tensor:
        """Returns the normalised hidden states of the step's tokens, [tokens, hidden]."""
        angles = positions[:, None, None].float() * self.frequencies
        cosine, sine = angles.cos(), angles.sin()
        x = self.weights["model.embed_tokens.weight"][token_ids]
        for index, (attention, kv_cache) in enumerate(zip(self.attention, kv_caches, strict=True)):
            layer = f"model.layers.{index}."
            hidden = self.norm(x, layer + "input_layernorm")
            query = rotate(self.heads(hidden, layer + "self_attn.q_proj"), cosine, sine)
            key = rotate(self.heads(hidden, layer + "self_attn.k_proj"), cosine, sine)
            value = self.heads(hidden, layer + "self_attn.v_proj")
            output = torch.empty_like(query)
            attention.forward(self.scales, query, key, value, kv_cache, metadata, output)
            x = x + self.linear(output.flatten(1), layer + "self_attn.o_proj")
            hidden = self.norm(x, layer + "post_attention_layernorm")
            gated = functional.silu(self.linear(hidden, layer + "mlp.gate_proj"))
            x = x + self.linear(gated * self.linear(hidden, layer + "mlp.up_proj"), layer + "mlp.down_proj")
        return self.norm(x, "model.norm")

    def next_tokens(self, hidden: Tensor) -> Tensor:
        """Returns the most likely next token of each row."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (hidden.float() @ head.float().T).argmax(-1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def heads(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, name).unflatten(-1, (-1, self.head_size))

    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return wide.to(x.dtype) * self.weights[name + ".weight"]


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies the rotary embedding to pairs (i, i + head_size / 2)."""
    first, second = heads.float().chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(heads.dtype)


class Generator:
    """Prefills eagerly and decodes through one graph per batch size; greedy."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_num_seqs: int = 8,
        max_seq_len: int = 512,
        num_blocks: int = 512,
    ) -> None:
        self.device = torch.device(device)
        self.model = TorchDecoder(folder, self.device, dtype)
        self.num_blocks, self.max_blocks = num_blocks, -(-max_seq_len // BLOCK_SIZE)
        self.manager = CacheManager(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
        self.tables = BlockTableCache()
        spec = KVCacheSpec(
            num_kv_heads=self.model.num_kv_heads,
            head_size=self.model.head_size,
            block_size=BLOCK_SIZE,
            dtype=str(dtype).removeprefix("torch."),
        )
        shape = spec.shape(num_blocks)
        self.kv_caches = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in self.model.attention]
        names = [f"layer.{index}" for index in range(len(self.kv_caches))]
        builder_cls = self.model.backend.get_builder_cls()
        self.builder = builder_cls(spec, names, BuilderConfig(num_heads=self.model.num_heads), self.device)
        self.sizes = Buckets.powers_of_two("sequences", max_num_seqs)
        self.graphs = StepGraphs(self.device)
        self.buffers: dict[int, StepBuffers] = {}
        self.steps = 0

    def capture(self) -> None:
        """Captures the decode step of every batch size, the largest first, so that the others reuse its memory."""
        for size in reversed(self.sizes.sizes):
            layout = self.layout(size, size)
            buffers = self.buffers[size] = StepBuffers(layout, self.device)
            arrays = buffers.arrays
            metadata = self.builder.build_for_cudagraph_capture(self.build((), layout), arrays=arrays)

            def step(arrays=arrays, metadata=metadata) -> Tensor:
                hidden = self.model(arrays["token_ids"], arrays["positions"], self.kv_caches, metadata)
                return self.model.next_tokens(hidden)

            self.graphs.capture(size, step)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Returns `max_tokens` greedy tokens for each prompt; prompts that share a prefix share its blocks."""
        if not self.buffers:
            self.capture()
        seq_ids = [str(index) for index in range(len(prompts))]
        work = [
            (seq_id, len(prompt) - self.manager.add(seq_id, prompt))
            for seq_id, prompt in zip(seq_ids, prompts, strict=True)
        ]
        new_tokens: list[list[int]] = [[] for _ in prompts]
        inputs = [prompt[-count:] for prompt, (_, count) in zip(prompts, work, strict=True)]
        for _ in range(max_tokens):
            committed = self.manager.commit(self.manager.plan(work))
            sampled = self.run(committed, inputs)
            for seq_id, tokens, token in zip(seq_ids, new_tokens, sampled, strict=True):
                tokens.append(token)
                self.manager.append_tokens(seq_id, [token])
            self.manager.retire(committed.step_id)
            work, inputs = [(seq_id, 1) for seq_id in seq_ids], [[token] for token in sampled]
        for seq_id in seq_ids:
            self.manager.finish(seq_id)
        return new_tokens

    def run(self, committed: CommittedStep, inputs: list[list[int]]) -> list[int]:
        """Runs a step and returns the next token of each row."""
        if committed.copies:
            pairs = torch.tensor([copy[:2] for copy in committed.copies], dtype=torch.int32, device=self.device)
            copy_blocks(self.kv_caches, pairs)
        rows, self.steps = committed.rows, self.steps + 1
        token_ids = [token for row in inputs for token in row]
        if all(row.num_new_tokens == 1 for row in rows):
            size = self.sizes.pad(len(rows))
            buffers = self.buffers[size]
            buffer = buffers.host_buffer(self.steps)
            self.build(rows, buffers.layout, buffer)
            buffers.layout["token_ids"].of(buffer)[: len(token_ids)] = token_ids
            buffers.layout["token_ids"].of(buffer)[len(token_ids) :] = 0
            buffers.upload(self.steps)
            return self.graphs.replay(size)[: len(rows)].tolist()
        layout = self.layout(len(rows), len(token_ids))
        common = self.build(rows, layout)
        layout["token_ids"].of(common.packed)[:] = token_ids
        arrays = upload(common, self.device)
        metadata = self.builder.build(0, common, arrays=arrays)
        hidden = self.model(arrays["token_ids"], arrays["positions"], self.kv_caches, metadata)
        return self.model.next_tokens(hidden[arrays["query_start_loc"][1:] - 1]).tolist()

    def layout(self, num_seqs: int, num_tokens: int) -> PackedLayout:
        """Returns the layout of a step: its metadata, and its tokens in the same upload."""
        extra = [("token_ids", (num_tokens,))]
        return metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=self.max_blocks, extra=extra)

    def build(
        self, rows: Sequence[SequenceRowLike], layout: PackedLayout, buffer: np.ndarray | None = None
    ) -> CommonAttentionMetadata:
        """Builds the metadata of rows into a layout's padded sizes."""
        num_seqs, num_tokens = layout["seq_lens"].size, layout["slot_mapping"].size
        return build_common_metadata(
            rows,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_blocks=self.max_blocks,
            max_query_len=1 if num_tokens == num_seqs else None,
            table_cache=self.tables,
            layout=layout,
            buffer=buffer,
        )


def main() -> None:
    """Continues a few prompts and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--compare", action="store_true", help="run the JAX engine too and compare the tokens")
    arguments = parser.parse_args()

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = ["The for statement", "A class definition", "If the"]
    token_ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    generator = Generator(arguments.model, device=arguments.device)
    found = generator.generate(token_ids, arguments.max_tokens)
    for prompt, new in zip(prompts, found, strict=True):
        print(f"{prompt}{tokenizer.decode(new)}\n")
    if arguments.compare:
        from jattn import LLM, SamplingParams, load_model

        model, _, _ = load_model(arguments.model, dtype="float32")
        params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
        theirs = [list(output.outputs[0].token_ids) for output in LLM(model).generate(token_ids, params)]
        print(f"the JAX engine's tokens are the same: {theirs == found}")


if __name__ == "__main__":
    main()
