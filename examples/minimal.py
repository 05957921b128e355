"""Decoding with a target and a draft that are tables of probabilities. Start here.

Run it with ``python examples/minimal.py``; it needs only numpy. ``decode`` repeats an *iteration*
(dsbd_ort/decoding/decode.py) until the beams are complete:

    draft    the draft model proposes the next tokens. They form a *forest*: a trie whose nodes are
             (path, token) pairs. The nodes of one depth are a *layer*.
    verify   the target computes all new nodes in one call, a *forward*.
    select   layer by layer, the target's distribution selects the beams. A layer whose beams were
             all drafted is *accepted*, and the next layer can be selected too. The layer after the
             last accepted layer is the *bonus*: its beams are selected, but not yet computed.
             Accepted layers and the bonus are *committed*: they are final.
    prune    nodes that no beam needs leave the forest and the caches of both models.
"""

from __future__ import annotations

import numpy as np

from dsbd_ort.decoding import DecodingConfig, TableModel, decode

WORDS = ["the", "cat", "dog", "sat", "ran", "."]
TARGET = np.array(  # the large model: probability of the next word (column) after a word (row)
    [
        [0.02, 0.50, 0.42, 0.02, 0.02, 0.02],  # the
        [0.02, 0.02, 0.02, 0.60, 0.30, 0.04],  # cat
        [0.02, 0.02, 0.02, 0.25, 0.65, 0.04],  # dog
        [0.30, 0.02, 0.02, 0.02, 0.02, 0.62],  # sat
        [0.40, 0.02, 0.02, 0.02, 0.02, 0.52],  # ran
        [0.50, 0.10, 0.10, 0.10, 0.10, 0.10],  # .
    ]
)
DRAFT = 0.8 * TARGET + 0.2 / len(WORDS)  # the small model: similar, but less certain


def model(table: np.ndarray) -> TableModel:
    """Return a model whose logits depend only on the last word of the path."""
    return TableModel(len(WORDS), lambda path: np.log(table[path[-1]]))


config = DecodingConfig(
    strategy="dsbd",  # returns what "beam-sample" returns for the seed, in fewer target calls
    num_beams=3,  # beams in each committed layer
    draft_length=4,  # layers that the draft proposes in an iteration
    draft_beams=5,  # candidates in each of them; a layer is accepted if they include all 3 beams
    max_new_tokens=10,
    eos_token_id=WORDS.index("."),
    num_return_sequences=3,
)
prompt = [WORDS.index("the")]
result = decode(model(TARGET), model(DRAFT), prompt, config, np.random.default_rng(seed=2))

for sequence in result.sequences:  # best first: by log-probability per token
    words = " ".join(WORDS[token] for token in prompt + sequence.token_ids)
    print(f"{sequence.logprob:7.3f}  {words}  ({sequence.finish_reason})")
stats = result.stats
print(f"{stats.num_iterations} iterations, each of which commits one bonus layer")
print(f"{stats.num_accepted_layers} of {stats.num_draft_layers} drafted layers accepted")
print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted nodes accepted")
print(f"{stats.target_calls} calls of the target, {stats.draft_calls} of the draft")
