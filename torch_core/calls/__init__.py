"""The calls: what is wanted of attention and of the cache, said once for torch tensors, JAX arrays and array specs.

A call holds arrays and options, checks them together, and says what it returns. It is generic over what stands for an
array: the public functions make calls of tensors or JAX arrays, planners take `call.map(array_spec)`, and every
implementation takes the call whole, so that nothing is lost on the way and a new option is no argument of anybody's.
"""

from torch_core.calls.attention import (
    BIAS_FIELDS,
    SCORE_FIELDS,
    AttentionCall,
    DenseCall,
    PagedCall,
    TableCall,
    cache_fields,
)
from torch_core.calls.backward import DenseBackwardCall, backward_of, forward_of
from torch_core.calls.cache import CopyCall, WriteCall
from torch_core.calls.call import Call, dtype_name
from torch_core.calls.cascade import SharedPrefix, cascade_attention, cascade_calls, shared_prefix
from torch_core.calls.dropout import dropout_limit, keep_factor, keep_mask
from torch_core.calls.experts import ACTIVATIONS, ExpertsCall
from torch_core.calls.latent import LatentCall, LatentWriteCall, as_paged, as_write
from torch_core.calls.merge import MergeCall
from torch_core.calls.rotary import RotaryWriteCall
from torch_core.calls.routing import SCORING_FUNCS, RouteCall
from torch_core.calls.serves import IMPLEMENTATIONS, SERVES, refuse_unserved, serves_table, unserved
from torch_core.calls.sparse import ChoiceCall, IndexerCall, check_chosen_values, choice_of, chosen_latents
from torch_core.calls.values import check_values

__all__ = [
    "ACTIVATIONS",
    "BIAS_FIELDS",
    "IMPLEMENTATIONS",
    "SCORE_FIELDS",
    "SCORING_FUNCS",
    "SERVES",
    "AttentionCall",
    "Call",
    "ChoiceCall",
    "CopyCall",
    "DenseBackwardCall",
    "DenseCall",
    "ExpertsCall",
    "IndexerCall",
    "LatentCall",
    "LatentWriteCall",
    "MergeCall",
    "PagedCall",
    "RotaryWriteCall",
    "RouteCall",
    "SharedPrefix",
    "TableCall",
    "WriteCall",
    "as_paged",
    "as_write",
    "backward_of",
    "cache_fields",
    "cascade_attention",
    "cascade_calls",
    "check_chosen_values",
    "check_values",
    "choice_of",
    "chosen_latents",
    "dropout_limit",
    "dtype_name",
    "forward_of",
    "keep_factor",
    "keep_mask",
    "refuse_unserved",
    "serves_table",
    "shared_prefix",
    "unserved",
]
