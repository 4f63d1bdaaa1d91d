"""Pages of the reference: an entry for each public name, which mkdocstrings fills from its docstring."""

from __future__ import annotations

from importlib import import_module

#: The public modules, and the sentence at the head of their pages.
MODULES = {
    "jattn": "The main names. Each is loaded on first use.",
    "jattn.ops": "Attention and other operations on JAX arrays.",
    "jattn.nn": "Flax modules. The linen module is `jattn.nn.linen.MultiHeadAttention`.",
    "jattn.pool": "The arrays of a cache.",
    "jattn.parallel": "Sequences over several devices, inside `jax.shard_map`.",
    "jattn.bridge": "Arrays of JAX as tensors of torch, and back.",
    "jattn.llm.engine": "The engine. The module `jattn.engine` has the same names.",
    "jattn.llm.models": "Decoders and encoders. After `import jattn.models` that module has the same names.",
    "jattn.llm.load": "Folders and files of models. The module `jattn.load` has the same names.",
    "jattn.llm.serve": "The server. The module `jattn.serve` has the same names.",
    "jattn.llm.testing": "The cross-check. The module `jattn.testing` has the same names.",
    "torch_core.cache": "The allocator of blocks and state slots. It needs Python's standard library alone.",
    "torch_core.metadata": "From the rows of a step to int32 arrays, in numpy.",
    "torch_core.ops": "The operations on torch tensors.",
    "torch_core.vllm": "vLLM's attention backends, builders and selection.",
    "torch_core.vllm.ops": "vLLM's operations, with its names and parameters.",
    "torch_core.vllm.ops.states": "vLLM's operations of layers with a state.",
}
#: Public names of modules without a list of them.
ALSO = {
    "jattn.nn": ["jattn.nn.linen.MultiHeadAttention"],
    "jattn.llm.serve": ["jattn.llm.serve.background.BackgroundServer", "jattn.llm.serve.config.ServeConfig"],
    "jattn.integrations": [
        "jattn.integrations.tunix.Rollout",
        "jattn.integrations.tunix_sampler.Sampler",
        "jattn.integrations.skyrl.Generator",
        "jattn.integrations.skyrl.dot_product_attention",
        "jattn.integrations.maxtext.attention",
    ],
}


def pages() -> dict[str, str]:
    """Returns the page of each public module by file name."""
    main = set(import_module("jattn").__all__)
    found = {}
    for module, sentence in MODULES.items():
        entries = []
        for name in sorted(names(module), key=str.lower):
            if module != "jattn" and name in main and _same(module, name):
                entries.append(f"## {name}\n\nSee [jattn.{name}](jattn.md#jattn.{name}).\n")
            else:
                entries.append(f"::: {module}.{name}\n")
        entries += [f"::: {path}\n" for path in ALSO.get(module, [])]
        found[f"{module}.md"] = f"# {module}\n\n{sentence}\n\n" + "\n".join(entries)
    others = "\n".join(f"::: {path}\n" for path in ALSO["jattn.integrations"])
    found["jattn.integrations.md"] = f"# jattn.integrations\n\nTrainers and layers of other projects.\n\n{others}"
    return found


def names(module: str) -> list[str]:
    """Returns a module's public names: its list, or the functions and classes that it defines."""
    found = vars(import_module(module))
    own = [name for name, each in found.items() if getattr(each, "__module__", None) == module and name[0] != "_"]
    return list(getattr(import_module(module), "__all__", own))


def _same(module: str, name: str) -> bool:
    return getattr(import_module(module), name) is getattr(import_module("jattn"), name)
