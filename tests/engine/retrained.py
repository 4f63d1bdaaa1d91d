"""One of two processes whose engine takes new weights: `python -m tests.engine.retrained PORT PROCESS`.

Process 0 prints what it generated with the first weights, with others that each process has whole, and with a third
kind that a trainer's mesh has spread over both, and what was refused on the way.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, join
from tests.engine.conftest import tiny_decoder
from torch_core.base.errors import InvalidInput

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, tensor_parallel_size=2)
PROMPTS = [list(range(start, start + 9)) for start in (1, 20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def weights(seed: int) -> dict[str, Any]:
    """Returns a state of the tiny decoder in host memory, large enough for its layers to decide what comes next."""
    shapes: Any = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(tiny_decoder())))
    source = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: source.standard_normal(leaf.shape, np.float32), shapes)


def said(engine: Engine) -> list[list[int]]:
    """Returns the tokens behind each prompt."""
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    while engine.num_unfinished:
        engine.step()
    return [request.output_token_ids for request in requests]


def _spread(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as a trainer has it, whose mesh has the devices in another order."""
    mesh = Mesh(np.array(jax.devices()[::-1]), ("fsdp",))

    def place(leaf: np.ndarray) -> jax.Array:
        spec = PartitionSpec() if leaf.shape[0] % 2 else PartitionSpec("fsdp")
        return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda part: leaf[part])

    return jax.tree.map(place, state)


def main(port: str, process: int) -> None:
    """Generates and changes weights in turn, or follows who does."""
    join(f"127.0.0.1:{port}", 2, process)
    engine = Engine(tiny_decoder(), CONFIG)
    found: dict[str, list[Any]] = {"said": [], "refused": []}

    def change(state: Any) -> None:
        try:
            engine.update_weights(state)
        except InvalidInput as error:
            found["refused"].append(str(error))

    # The second and the third are refused in process 1 alone: it lacks parameters, or their keys have no order.
    refused = [weights(2), weights(2)] if process == 0 else [{}, {0: 1, "norm": 1}]
    for state in (weights(1), *refused, _spread(weights(3))):
        if process == 0:
            found["said"].append(said(engine))
            change(state)
            engine.sleep()
        else:
            engine.follow()
        change(state)
        if process == 0:
            engine.wake()
    if process == 0:
        found["said"].append(said(engine))
        engine.close()
        print("found", json.dumps(found))
    else:
        engine.follow()
        assert engine.closed


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
