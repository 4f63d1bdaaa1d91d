"""Which families there are: those of this package, and those that a user registers."""

from __future__ import annotations

from jattn.llm.load.families.afmoe import AFMOE
from jattn.llm.load.families.axk1 import AXK1
from jattn.llm.load.families.bailing import BAILING_HYBRID
from jattn.llm.load.families.bamba import BAMBA
from jattn.llm.load.families.bart import BART
from jattn.llm.load.families.bert import BERT, BERT_CLASSIFIER
from jattn.llm.load.families.cohere2_moe import COHERE2_MOE
from jattn.llm.load.families.cwm import CWM
from jattn.llm.load.families.deepseek_v2 import DEEPSEEK_V2
from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32, YOUTU
from jattn.llm.load.families.dots import DOTS1
from jattn.llm.load.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from jattn.llm.load.families.exaone_moe import EXAONE_MOE
from jattn.llm.load.families.falcon import FALCON
from jattn.llm.load.families.falcon_h1 import FALCON_H1
from jattn.llm.load.families.family import Family
from jattn.llm.load.families.gemma import GEMMA, GEMMA2
from jattn.llm.load.families.gemma3 import EMBEDDING_GEMMA, GEMMA3
from jattn.llm.load.families.gemma4 import GEMMA4
from jattn.llm.load.families.gemma4_unified import GEMMA4_UNIFIED
from jattn.llm.load.families.glm5 import GLM_MOE_DSA
from jattn.llm.load.families.glm_moe import GLM4_MOE, GLM4_MOE_LITE
from jattn.llm.load.families.gpt2 import GPT2, STARCODER2
from jattn.llm.load.families.gpt_bigcode import GPT_BIGCODE
from jattn.llm.load.families.gpt_neo import GPT_NEO
from jattn.llm.load.families.gpt_neox import BLOOM, GPT_NEOX
from jattn.llm.load.families.gptj import GPTJ
from jattn.llm.load.families.granite_hybrid import GRANITE_MOE_HYBRID
from jattn.llm.load.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from jattn.llm.load.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from jattn.llm.load.families.helium import HELIUM, INTERNLM3
from jattn.llm.load.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from jattn.llm.load.families.hunyuan3 import HY_V3
from jattn.llm.load.families.hyperclovax import HYPERCLOVAX
from jattn.llm.load.families.kimi import KIMI_LINEAR
from jattn.llm.load.families.laguna import LAGUNA
from jattn.llm.load.families.lfm2 import LFM2
from jattn.llm.load.families.lfm2_moe import LFM2_MOE
from jattn.llm.load.families.lfm3 import LFM3
from jattn.llm.load.families.llama import GRANITE, LLAMA, MISTRAL, PHI3, SEED_OSS, SMOLLM3
from jattn.llm.load.families.llama4 import LLAMA4
from jattn.llm.load.families.mellum import FLINT, MELLUM
from jattn.llm.load.families.mimo import MIMO_V2_FLASH
from jattn.llm.load.families.minicpm3 import MINICPM3
from jattn.llm.load.families.minimax import MINIMAX
from jattn.llm.load.families.ministral import MINISTRAL3, MISTRAL4
from jattn.llm.load.families.ministral_8b import MINISTRAL
from jattn.llm.load.families.mixtral import GPT_OSS, MIXTRAL
from jattn.llm.load.families.modernbert import MODERNBERT, MODERNBERT_CLASSIFIER
from jattn.llm.load.families.nanochat import NANOCHAT, OLMO
from jattn.llm.load.families.nemotron import APERTUS, ARCEE, JAIS2, NEMOTRON
from jattn.llm.load.families.nemotron_h import NEMOTRON_H
from jattn.llm.load.families.norms import COHERE, GLM, GLM4, OLMO2, OLMO3
from jattn.llm.load.families.olmo_hybrid import OLMO_HYBRID
from jattn.llm.load.families.olmoe import FLEX_OLMO, MINIMAX_M2, OLMOE
from jattn.llm.load.families.opt import OPT
from jattn.llm.load.families.phi import PHI, PHIMOE
from jattn.llm.load.families.qwen import QWEN2, QWEN3
from jattn.llm.load.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from jattn.llm.load.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jattn.llm.load.families.roberta import ROBERTA, ROBERTA_CLASSIFIER, XLM_ROBERTA, XLM_ROBERTA_CLASSIFIER
from jattn.llm.load.families.solar_open import SOLAR_OPEN
from jattn.llm.load.families.stablelm import PERSIMMON, STABLELM
from jattn.llm.load.families.t5 import T5
from jattn.llm.load.families.vault_gemma import VAULT_GEMMA
from jattn.llm.load.families.window_rope import COHERE2, EXAONE4
from torch_core.base.errors import InvalidInput

# In the order in which a config that was built by hand is tried: the first that can store it does.
_ORDER = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GRANITE, OLMO2, OLMO3, GLM, GLM4, SEED_OSS, SMOLLM3),
    *(COHERE, STARCODER2, GPT_NEOX, GPT2, BLOOM, FALCON, MIXTRAL, QWEN3_MOE, QWEN2_MOE, GPT_OSS),
    *(DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, BERT, T5, BART),
    *(GLM4_MOE, MINIMAX_M2, ERNIE4_5, ERNIE4_5_MOE, HUNYUAN_DENSE, HUNYUAN_MOE, MINISTRAL3, EXAONE4, COHERE2, OLMOE),
    *(PHI, PHIMOE, NEMOTRON, APERTUS, ARCEE, HELIUM, LLAMA4, STABLELM, PERSIMMON, INTERNLM3),
    *(MINICPM3, MISTRAL4, GLM4_MOE_LITE, GLM_MOE_DSA, GEMMA4),
    *(CWM, SOLAR_OPEN, AFMOE),
    *(MINISTRAL, HY_V3, DOTS1, EXAONE_MOE, YOUTU, COHERE2_MOE, MELLUM, FLINT, FLEX_OLMO, HYPERCLOVAX, JAIS2),
    *(LAGUNA, MIMO_V2_FLASH, GEMMA4_UNIFIED, VAULT_GEMMA),
    *(GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_SWA, GRANITE_MOE_SWA),
    *(LFM2, LFM2_MOE, LFM3, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, KIMI_LINEAR, BAILING_HYBRID),
    *(MINIMAX,),
    *(BAMBA, GRANITE_MOE_HYBRID, FALCON_H1, NEMOTRON_H),
    *(EMBEDDING_GEMMA, MODERNBERT, MODERNBERT_CLASSIFIER),
    *(AXK1, OPT, GPT_NEO, GPTJ, GPT_BIGCODE, NANOCHAT, OLMO),
    *(BERT_CLASSIFIER, ROBERTA, ROBERTA_CLASSIFIER, XLM_ROBERTA, XLM_ROBERTA_CLASSIFIER),
)
_FAMILIES = {family.architecture: family for family in _ORDER}


def known_families() -> dict[str, Family]:
    """Returns every family by its architecture."""
    return dict(_FAMILIES)


def register_family(family: Family) -> None:
    """Makes `load_model` and `save_model` know a family of your own, for the rest of the process.

    Args:
        family: the new family; its architecture must be unknown so far.

    Raises:
        InvalidInput: it is no Family, its architecture is known, or a field is no function of the config.

    Example:
        >>> register_family(known_families()["LlamaForCausalLM"])
        Traceback (most recent call last):
        torch_core.base.errors.InvalidInput: family.architecture is 'LlamaForCausalLM', which is known already.
    """
    if not isinstance(family, Family):
        raise InvalidInput("family", value=family, wanted="it must be a jattn.llm.load.Family")
    if family.architecture in _FAMILIES:
        raise InvalidInput("family.architecture", f"is {family.architecture!r}, which is known already")
    for name in ("names_of", "norms_without_weights"):
        if not callable(found := getattr(family, name)):
            raise InvalidInput(f"family.{name}", value=found, wanted="it must be a function of the config")
    _FAMILIES[family.architecture] = family
