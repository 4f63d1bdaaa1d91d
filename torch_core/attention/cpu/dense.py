"""Dense attention of packed sequences for CPU tensors."""

from __future__ import annotations

from torch import Tensor

from torch_core.attention.call import DenseCall
from torch_core.attention.cpu.masks import Extras, first_key
from torch_core.attention.cpu.result import open_results
from torch_core.attention.cpu.rows import attend_rows


def attention(call: DenseCall[Tensor]) -> dict[str, Tensor]:
    """Attends packed sequences one by one in float32. Nothing is checked."""
    query_starts, key_starts = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    seqs = [
        seq
        for seq in range(call.num_seqs)
        if query_starts[seq + 1] > query_starts[seq] and key_starts[seq + 1] > key_starts[seq]
    ]
    found, results = open_results(call)
    query, key, value = (
        x.float() if x.stride(2) == 1 else x.float().contiguous() for x in (call.query, call.key, call.value)
    )
    query = query.unflatten(1, (call.num_kv_heads, -1))
    all_extras = Extras.of(call)
    for seq in seqs:
        extras = all_extras.of_sequence(call, seq)
        rows = slice(query_starts[seq], query_starts[seq + 1])
        key_len = key_starts[seq + 1] - key_starts[seq]
        first = 0 if extras.mm_ranges is not None else first_key(key_len - rows.stop + rows.start, key_len, call.spec)
        keys = slice(key_starts[seq] + first, key_starts[seq + 1])
        near = (x[keys].transpose(0, 1) for x in (key, value))
        attended = attend_rows(
            query[rows], *near, first_key=first, key_len=key_len, scale=call.spec.scale, spec=call.spec, extras=extras
        )
        results.store(rows, *attended)
    return found
