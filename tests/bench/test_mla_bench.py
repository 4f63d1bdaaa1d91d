"""The benchmark of latent attention: what it needs."""

from __future__ import annotations

import jax
import pytest

from jattn.bench import mla
from jattn.bench.runner import main
from torch_core.base.errors import Unsupported


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_latent_attention_is_measured_on_cuda():
    with pytest.raises(Unsupported, match="jattn bench mla measures CUDA kernels"):
        main(mla.BENCHMARK, ["--heads", "16", "--no-jax"])
