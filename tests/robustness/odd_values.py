"""Values that callers give by mistake, and sensible ones of every field of DecodingConfig."""

import math
from typing import Any

import numpy as np

from dsbd_ort import AllowedTokens, Choice
from dsbd_ort.decoding import STRATEGIES

NUMBERS: list[Any] = [0, 1, 2, 3, 7, -1, 2**31, 2**63, 10**30, 10**400, -(10**400)]
FLOATS: list[Any] = [0.0, 0.5, 1.0, 2.5, -2.5, 1e308, -1e308, 5e-324, 1e-5, math.nan, math.inf]
ODD: list[Any] = [None, True, "", "4", "x", b"x", [], [1], [1, 2], [[1]], {}, {"a": 1}, "\ud800"]
ODD_VALUES: list[Any] = [
    *(*NUMBERS, *FLOATS, *ODD),
    *(np.uint8(255), np.int64(-3), np.float32(0.5), np.float64(np.nan), np.bool_(True)),
    *(np.array(2), np.array([1, 2]), np.zeros((2, 2)), np.str_("x"), np.array(["a", "b"])),
    *(len, lambda path, scores: scores, object(), Ellipsis, 1j, range(3), {1, 2}, iter([1])),
    *(b"7", bytearray(b"7"), "x" * 10_000, [None], [[[]]], (0.0, "x"), type),
]


class EvenTokens:
    """A scorer of the parity of tokens; all paths have one state."""

    name = "even tokens"

    def start(self, prompt_ids):
        return np.zeros(1)

    def advance(self, states, tokens):
        return states

    def scores(self, states, tokens):
        read = np.arange(258)[None] if tokens is None else tokens
        return np.broadcast_to(read % 2 * 0.5, (len(states), read.shape[1]))


SENSIBLE: dict[str, list[Any]] = {
    "strategy": [*STRATEGIES],
    "num_beams": [1, 2, 3],
    "coupling": ["gumbel", "rejection"],
    "width_policy": ["fixed", "threshold"],
    "min_beams": [1, 2],
    "accept_threshold": [0.0, 0.5, 1.0],
    "drafter": ["model", "ngram", "model+ngram", "none"],
    "draft_policy": ["fixed", "throughput"],
    "draft_length": [1, 2, 3],
    "draft_beams": [4, [2, 3], [4, 4, 4, 4]],
    "draft_context": [1, 64, "all", "auto"],
    "predicted_text": [None, "", "abc"],
    "predicted_token_ids": [[], [97, 98, 97]],
    "memory": ["forest", "single"],
    "replacement": [False, True],
    "temperature": [0.0, 1e-6, 0.7, 1e308],
    "top_k": [0, 1, 5, 300],
    "top_p": [5e-324, 0.5, 1.0],
    "min_p": [0.0, 0.3, 1.0],
    "typical_p": [5e-324, 0.5, 1.0],
    "repetition_penalty": [1e-6, 0.5, 1.0, 1.3, 1e6],
    "presence_penalty": [-1e6, 0.0, 0.5, 1e6],
    "frequency_penalty": [-1e6, 0.0, 0.5, 1e6],
    "no_repeat_ngram_size": [0, 1, 2, 1024],
    "encoder_no_repeat_ngram_size": [0, 1, 2, 1024],
    "bad_words_ids": [[], [5], [[97], [98, 99]], [[10**9]]],
    "logit_bias": [{}, {97: 5.0}, {"98": -1e9}, {97: 1e9}, [(97, 1), (97, 1)], {10**9: 1}],
    "suppress_tokens": [[], 97, [97, 98], [10**9]],
    "begin_suppress_tokens": [[], 97, [97, 98], [10**9]],
    "no_timestamps_token_id": [None, 97, 255, 10**9],
    "max_initial_timestamp_index": [None, 0, 5],
    "last_timestamp_token_id": [None, 0, 98, 10**9],
    "min_new_tokens": [0, 1, 3],
    "forced_bos_token_id": [None, 97],
    "forced_eos_token_id": [None, 98],
    "constraint": [None, AllowedTokens(lambda path: [97, 98], 98), Choice(["ab", "abc"])],
    "logits_processors": [[], [lambda path, scores: scores - 1.0]],
    "scorers": [[], [EvenTokens()]],
    "max_new_tokens": [1, 2, 5],
    "seed": [0, 5, 2**63, 2**127],
    "num_return_sequences": [1, 2],
    "length_penalty": [-30.0, 0.0, 2.0, 30],
    "early_stopping": [False, True, "never"],
    "joint_threshold": [5e-324, 0.5, 1e308],
    "joint_tokens": [1, 2],
    "joint_beams": [1, 2],
    "stop_strings": ["a", ["a", "bc"], "\N{REPLACEMENT CHARACTER}"],
    "eos_token_id": [97, [97, 98], [], 10**9],
    "top_logprobs": [0, 1, 20],
    "prompt_logprobs": [False, True],
    "skip_special_tokens": [False, True],
}
