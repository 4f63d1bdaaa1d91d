"""The layers round as Hugging Face's do."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models.layers import RMSNorm


def test_a_bfloat16_norm_has_every_bit_of_transformers(seed):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    random = np.random.default_rng(seed)
    x, weight = random.normal(size=(64, 96)), random.normal(1, 0.2, 96)
    theirs = llama.LlamaRMSNorm(96, 1e-5).to(torch.bfloat16)
    theirs.weight.data = torch.from_numpy(weight).to(torch.bfloat16)
    ours = RMSNorm(96, epsilon=1e-5, dtype="bfloat16")
    ours.weight[...] = jnp.asarray(weight, jnp.bfloat16)

    found = np.asarray(ours(jnp.asarray(x, jnp.bfloat16)), np.float32)

    np.testing.assert_array_equal(found, theirs(torch.from_numpy(x).to(torch.bfloat16)).float().detach().numpy())
