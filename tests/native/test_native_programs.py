"""Programs written for dsbd.h get of the native library what Python gives, by changing the library.

Its requests are token ids; texts are in test_native_text.py.
"""

import json
import re

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_ort.requests.results import result_object
from tests.embedding.conftest import PROGRAMS, output_of
from tests.native.conftest import ROOT
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

PROMPTS = [[1, 2, 3], [250], list(range(40, 160)), [256, 97]]
FIXED = {"draft_policy": "fixed"}  # "throughput" decides by times what is computed in one call
OPTIONS = [
    FIXED,
    {"num_beams": 2, "width_policy": "threshold", "min_beams": 1, **FIXED},
    {"num_beams": 3, "num_return_sequences": 2, **FIXED},
    {"strategy": "beam-sample", "num_beams": 2, "top_k": 5},
    {"strategy": "speculative", "draft_length": 3, **FIXED},
    {"strategy": "tree-speculative", "top_logprobs": 2, **FIXED},
    {"strategy": "sample", "temperature": 0.7, "top_k": 5, "prompt_logprobs": True},
    {"strategy": "beam-search", "num_beams": 2, "repetition_penalty": 1.2},
    {"strategy": "speculative-beam-search", "length_penalty": 0.5, **FIXED},
    {"strategy": "greedy", "logit_bias": {"7": 3.5}},
    {"strategy": "mjsd"},
    {"coupling": "rejection", "drafter": "ngram"},
]
REQUESTS = [
    (prompt, {"max_new_tokens": 8, "seed": len(OPTIONS) * number + seed, **options})
    for number, prompt in enumerate(PROMPTS)
    for seed, options in enumerate(OPTIONS)
]
REQUESTS.append(([3], {"max_new_tokens": 8, "seed": 0, "num_beams": 2}))
TIMES = re.compile(".*_s|kv_bytes_peak")


def checked_result(fields, wanted):
    """Compare all but times and memory; numpy's exp and log depend on the processor's last bit."""
    expected = json.loads(json.dumps(result_object(wanted)))
    for stats in (fields["stats"], expected["stats"]):
        for name in [name for name in stats if TIMES.fullmatch(name)]:
            stats[name] = None
    assert list(fields) == list(expected) and list(fields["stats"]) == list(expected["stats"])
    for found, sequence in zip(fields["sequences"], expected["sequences"], strict=True):
        sequence["text"] = found["text"]
        for name in ("token_logprobs", "logprob", "score"):
            sequence[name] = pytest.approx(sequence[name], abs=1e-9)
        for at, tops in enumerate(sequence.get("top_logprobs", [])):
            sequence["top_logprobs"][at] = [[t, pytest.approx(p, abs=1e-9)] for t, p in tops]
        assert found == sequence and list(found) == list(sequence)
    if (prompt := expected.get("prompt_logprobs")) is not None:
        first, *others = prompt["token_logprobs"]
        prompt["token_logprobs"] = [first, *(pytest.approx(p, abs=1e-9) for p in others)]
    assert fields == expected


def lines_of(requests):
    return "".join(
        f"ids\t{' '.join(map(str, ids))}\t{json.dumps(options)}\n" for ids, options in requests
    )


@pytest.mark.parametrize("logits", ["full", "topk:64"])
def test_requests_get_what_python_gives(with_native, tmp_path, logits):
    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle, target=TinyModel(logits=logits), draft=TinyModel(seed=1))
    settings = '{"num_threads": 1, "provider": "cpu"}'
    done = output_of(with_native(PROGRAMS / "ask.c"), bundle, settings, input=lines_of(REQUESTS))
    assert done.returncode == 0, done.stderr
    with Pipeline.from_bundle(bundle, num_threads=1) as pipeline, Service(pipeline) as service:
        answers = done.stdout.splitlines()
        for (ids, options), line in zip(REQUESTS, answers, strict=True):
            steps, _, result = line.split("\t")
            fields = json.loads(result)
            best = fields["sequences"][0]
            streamed = [step.split(":") for step in steps.split()]
            assert [int(token) for token, _ in streamed] == best["token_ids"]
            assert [float(logprob) for _, logprob in streamed] == best["token_logprobs"]
            wanted = service.generate(ids, **options)
            if options.keys() == {"max_new_tokens", "seed", "num_beams"}:
                assert best["token_ids"] == wanted.sequences[0].token_ids
            else:
                checked_result(fields, wanted)
    stats = json.loads(done.stderr)
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["max_rows"] > 0 and stats["kv_bytes"] > 0


def test_the_header_is_that_of_the_other_library():
    """Same statuses, structures and functions, so that a program changes the library alone."""

    def declarations(file):
        text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
        return " ".join(text.partition("#ifndef DSBD_NATIVE_H")[0].split())

    native, other = ROOT / "native" / "dsbd_native.h", ROOT / "dsbd_ort" / "embedding" / "dsbd.h"
    assert declarations(native) == declarations(other)
