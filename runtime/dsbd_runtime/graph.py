"""The tensor names of the engines: the graph contract that exporter and runtime share.

S: forest nodes of one call (parents before children), C: cache capacity in rows, R: rows whose
logits are asked for, V: vocabulary, Hkv: key/value heads, D: head dimension, K: rows to keep.

| tensor | shape, type | meaning |
|---|---|---|
| input_ids, position_ids | [1,S] int64 | the nodes; siblings share a position |
| attention_mask | [1,1,S,C] bool | node s sees cache row c; nothing else masks |
| attention_mask_sliding | [1,1,S,C] bool | the same cut to the window, for sliding-window layers |
| write_indices | [1] int64 | first cache row of the S new rows |
| logit_rows | [R] int64 | which of the S nodes need logits |
| past_key_values.{i}.key, .value | [1,Hkv,C,D] | the external cache |
| present.{i}.key, .value | [1,Hkv,C,D] | the same buffer, updated in place |
| logits | [R,V] float32 | |

An engine with a top-k head returns of each row, instead of logits, its K largest by decreasing
logit, and the log of the sum of exp(logit) over all V tokens: top_logits [R,K] float32,
top_ids [R,K] int64 and logsumexp [R] float32.

The prune graph takes src_rows [K] int64, write_indices [1] int64 and the caches; row
write_indices + k becomes the old row src_rows[k].
"""

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
ATTENTION_MASK = "attention_mask"
ATTENTION_MASK_SLIDING = "attention_mask_sliding"
WRITE_INDICES = "write_indices"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
TOP_LOGITS = "top_logits"
TOP_IDS = "top_ids"
LOGSUMEXP = "logsumexp"
SRC_ROWS = "src_rows"

CACHE_PARTS = ("key", "value")


def past_name(layer: int, part: str) -> str:
    """Return the input name of one cache; ``part`` is "key" or "value"."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Return the output name of one cache; ``part`` is "key" or "value"."""
    return f"present.{layer}.{part}"
