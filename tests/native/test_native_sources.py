"""Encoder-decoders in the native library: engines, whole requests, languages, refusals.

What is compared with Python is decoded by the same engine calls, so that bits must agree.
"""

import json
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_forward.forward import Forward, RowSources
from dsbd_ort import Pipeline
from dsbd_ort.decoding import STRATEGIES as STRATEGIES_BY_NAME
from dsbd_ort.decoding import DecodeResult
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, Preempted
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_pair
from dsbd_runtime.text.tokenizer import Tokenizer
from scripts.family_checkpoints import write_family_checkpoint
from tests.encoder_decoder_pair import exported, exported_translator, some_sources, with_defaults
from tests.export.cut_decoders import cut_decoder
from tests.export.test_marian_tokenizer import SOURCES, TARGETS, UNKNOWN, with_marian_files
from tests.exports import export_quietly
from tests.made_once import made_once
from tests.native.table_requests import UNSUPPORTED
from tests.native.test_native_engine import NativeEngine, assert_same_logits
from tests.native.test_native_programs import FIXED, checked_result
from tests.native.text_command import ask, command_in
from tests.robustness.demo_requests import demo_requests
from tests.robustness.model_kinds import SOURCE_TEXTS
from tests.runtime.bundle_edits import edited, put
from tests.test_translation import WRONG
from tests.tokenizer_corpus import random_texts


def shared_encoder(captures, folder):
    """Marian, drafted by its encoder and the first layer of its decoder."""
    target = with_defaults(write_family_checkpoint("marian", folder / "marian"))
    export_quietly(captures, folder / "bundle", target, cut_decoder(target, folder / "draft"))
    return folder


PAIRS = {  # names as other tests have them, which then make them once
    "encoder-decoders": lambda captures, to: exported("marian", "t5", captures, to),
    "translator-pair": lambda captures, to: exported_translator("bart", captures, to),
    "shared-encoder": shared_encoder,
    "t5-marian": lambda captures, to: exported("t5", "marian", captures, to),
}
LONG = [pytest.param("t5-marian", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=[*PAIRS][:3] + LONG)
def bundle(request, captures, tmp_path_factory):
    name, make = request.param, PAIRS[request.param]
    return made_once(tmp_path_factory, name, lambda to: make(captures, to)) / "bundle"


@pytest.fixture(scope="module")
def pipe(bundle):
    with Pipeline.from_bundle(bundle, num_threads=1) as opened:
        yield opened


class NativeRequests:
    """requests_test in a process of its own."""

    def __init__(self, native_build, bundle, *settings):
        command = [native_build / "tests" / "requests_test", bundle, *settings]
        self._program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answers(self, requests):
        self._program.stdin.write(json.dumps(requests) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())

    def close(self):
        self._program.stdin.close()
        assert self._program.wait(timeout=60) == 0
        self._program.stdout.close()


@pytest.fixture(scope="module")
def native(native_build, bundle):
    requests = NativeRequests(native_build, bundle)
    yield requests
    requests.close()


def random_forward(rng, engine, paths, of_rows, sources, num_new):
    """Rows that each descend from a random row or begin a path, and the source of each row.

    paths: (N, N) bool, the rows that each cache row sees. of_rows: number of the source of each.
    """
    num_rows = engine.num_rows
    mask = np.zeros((num_new, num_rows + num_new), np.bool_)
    of_rows = list(of_rows)
    for row in range(num_new):
        parent = int(rng.integers(-1, num_rows + row)) if rng.random() < 0.4 else num_rows + row - 1
        if parent >= num_rows:
            mask[row] = mask[parent - num_rows]
        elif parent >= 0:
            mask[row, :num_rows] = paths[parent]
        mask[row, num_rows + row] = True
        of_rows.append(of_rows[parent] if parent >= 0 else int(rng.integers(len(sources))))
    numbers = of_rows[num_rows:]
    distinct = list(dict.fromkeys(numbers))
    several = RowSources(
        tuple(sources[number] for number in distinct),
        np.array([distinct.index(number) for number in numbers]),
    )
    of_one = len(distinct) == 1
    forward = Forward(
        rng.integers(0, engine.spec.vocab_size, num_new),
        mask.sum(axis=1) - 1,
        mask,
        rng.integers(0, num_new, min(num_new, 9)),
        source=several.distinct[0] if of_one else None,
        sources=None if of_one else several,
    )
    return forward, of_rows


def assert_same_engine(native, role, engine, seed_number):
    rng = np.random.default_rng(seed_number)
    sources = [tuple(source) for source in some_sources(6)]
    paths, of_rows = np.zeros((0, 0), np.bool_), []
    for num_new in (1, 3, 20, 1, 5, 40, 2, 2, 7):
        forward, of_rows = random_forward(rng, engine, paths, of_rows, sources, num_new)
        read = forward.row_sources
        more = {"sources": read.distinct, "source_of_row": read.index.tolist()}
        answer = native.forward(forward, role=role, more=more)
        assert_same_logits(native, engine.forward(forward).logits, answer)
        paths = np.vstack([np.pad(paths, ((0, 0), (0, num_new))), forward.mask])
        kept = np.flatnonzero(paths[rng.random(engine.num_rows) < 0.2].any(axis=0))
        if rng.random() < 0.2:
            kept = kept[:0]
        engine.keep(kept)
        native.ask(keep=kept.tolist(), role=role)
        paths, of_rows = paths[kept][:, kept], [of_rows[row] for row in kept]
        for number in set(range(len(sources))) - set(of_rows):
            engine.release_source(sources[number])
            native.ask(release=sources[number], role=role)


def test_engines_have_the_bits_of_pythons(native_build, bundle):
    """Calls with one source and with several, whose slots are released and made again."""
    native = NativeEngine(native_build, bundle, "both")
    target, draft = load_pair(open_bundle(bundle), settings=EngineSettings(num_threads=1))
    with target, draft:
        for seed_number in range(4):
            assert_same_engine(native, "target", target, seed_number)
            assert_same_engine(native, "draft", draft, seed_number)
            for role, engine in (("target", target), ("draft", draft)):
                engine.keep(np.arange(0))
                native.ask(keep=[], role=role)
        row = {"token_ids": [1], "positions": [0], "mask": ["1"], "logit_rows": [0]}
        assert "has no source" in native.ask(forward=row, role="target")["error"]
    native.close()


def of_python(pipe, requests):
    """Decode requests together as requests_test does; errors as texts."""
    found = [None] * len(requests)
    with pipe.models.engines() as models:
        for model in models:
            model.keep(np.arange(0))
        decoder, live, prepared = BatchedDecoder(*models), {}, {}
        for number, request in enumerate(requests):
            try:
                given = pipe.prepare(request.get("prompt", request.get("ids")), request["options"])
                flags = iter(request.get("preempts", ()))
                preempts = lambda call, flags=flags: next(flags, False)  # noqa: E731
                prepared[number] = replace(given, preempts=preempts)
            except DsbdError as error:
                found[number] = str(error)
        for number, request in prepared.items():
            live[decoder.join(request)] = number
        while live:
            for progress in decoder.iterate():
                if isinstance(progress.event, Preempted):
                    decoder.resume(progress.live)
                elif isinstance(progress.event, DecodeResult):
                    number = live.pop(progress.live)
                    found[number] = pipe.with_text(progress.event, prepared[number])
                elif isinstance(progress.event, BaseException):
                    found[live.pop(progress.live)] = str(progress.event)
    return found


def assert_same_answers(native, pipe, requests):
    """Return how many requests were accepted."""
    num_accepted = 0
    for request, answer, wanted in zip(
        requests, native.answers(requests), of_python(pipe, requests), strict=True
    ):
        if isinstance(wanted, str):
            assert "error" in answer, (request, wanted)
            continue
        assert "error" not in answer, (request, answer)
        texts = [found["text"] for found in answer["sequences"]]
        assert texts == [sequence.text for sequence in wanted.sequences], request
        checked_result(answer, wanted)
        num_accepted += 1
    return num_accepted


STRATEGIES = [
    {},
    {"strategy": "greedy"},
    {"strategy": "beam-search", "num_return_sequences": 4},
    {"draft_length": 3, "num_return_sequences": 3, **FIXED},
    {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3, **FIXED},
    {"strategy": "sample", "temperature": 0.8},
    {"strategy": "speculative", "draft_length": 3, **FIXED},
    {"strategy": "tree-speculative", "draft_length": 2, "draft_beams": 2, **FIXED},
    {"strategy": "beam-sample", "num_beams": 3, "num_return_sequences": 3},
    {"strategy": "dsbd", "num_beams": 3, "draft_length": 2, "num_return_sequences": 3, **FIXED},
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "threshold", **FIXED},
    {"strategy": "dsbd", "drafter": "model+ngram", "encoder_no_repeat_ngram_size": 2, **FIXED},
    {"strategy": "dsbd", "coupling": "rejection", "num_beams": 2, "draft_length": 2, **FIXED},
    {"strategy": "mjsd", "draft_length": 2},
    {"strategy": "mjgd"},
]


def requests_of(sources, more=()):
    for number, (source, options) in enumerate(zip(sources, STRATEGIES, strict=True)):
        policy = {} if "draft_policy" in options or "strategy" in options else FIXED
        named = {"prompt" if isinstance(source, str) else "ids": source, **dict(more)}
        yield {**named, "options": {"seed": number, **policy, **options}}


def test_strategies_alone_together_and_preempted(native, pipe):
    """Of long and short sources, in text and in ids; of some there are two requests."""
    rng = np.random.default_rng(7)
    lengths = (1, 200, 3, 17, 40, 16, 90, 2, 30)
    sources = [[*rng.integers(3, 290, length).tolist(), 1] for length in lengths]
    sources += ["def read(path): return", "\N{SNOWMAN} x", *sources[:4]]
    requests = [*requests_of(sources)]
    for request in requests:
        assert assert_same_answers(native, pipe, [request])
    assert assert_same_answers(native, pipe, requests) == len(requests)
    preempted = [*requests_of(sources, {"preempts": (rng.random(60) < 0.3).tolist()}.items())]
    assert assert_same_answers(native, pipe, preempted) == len(requests)


def supported(drawn):
    """A drawn request whose calls depend on no time, without what the native library lacks."""
    options = {name: v for name, v in drawn.options.items() if name not in UNSUPPORTED}
    if STRATEGIES_BY_NAME[options["strategy"]].has_draft:
        options |= FIXED
    if "num_beams" in options:
        options["num_beams"] = min(options["num_beams"], 40)
    named = "prompt" if isinstance(drawn.prompt, str) else "ids"
    return {named: drawn.prompt, "options": options}


@pytest.mark.parametrize("number", [25, pytest.param(300, marks=pytest.mark.long)])
def test_any_requests_together(native, pipe, bundle, number):
    """Groups of requests drawn as tests/robustness does, some of them preempted."""
    languages = pipe.prompts.encoder.languages
    texts = replace(SOURCE_TEXTS, languages=tuple(languages or ()))
    num_accepted, rng = 0, np.random.default_rng(0)

    @seed(0)
    @settings(
        max_examples=number, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn=st.lists(demo_requests(texts=texts), min_size=1, max_size=5))
    def holds(drawn):
        nonlocal num_accepted
        requests = [supported(each) for each in drawn]
        for request in requests:
            if rng.integers(2):
                request["preempts"] = (rng.random(40) < 0.3).tolist()
        num_accepted += assert_same_answers(native, pipe, requests)

    holds()
    assert num_accepted > number / 2


@pytest.fixture(scope="module")
def translator(captures, tmp_path_factory):
    make = PAIRS["translator-pair"]
    folder = made_once(tmp_path_factory, "translator-pair", lambda to: make(captures, to))
    return folder / "bundle"


@pytest.fixture(scope="module")
def opus(captures, tmp_path_factory):
    """Marian with two sentencepiece files; its text is checked at opening."""

    def make(folder):
        target = with_marian_files(write_family_checkpoint("marian", folder / "marian"))
        draft = cut_decoder(with_defaults(target), folder / "draft")
        export_quietly(captures, folder / "bundle", target, draft)
        return folder

    return made_once(tmp_path_factory, "native-opus", make) / "bundle"


OPUS_SOURCES = (
    *SOURCES,
    ">>deu<< The house",
    " \x1c>>deu<<The >>deu<< house",
    ">>deu<<>>deu<< The >>xyz<<",
    "we went west",  # its w has an id that the model lacks
    "ﬁne\u00a0\r\n日本 e\u0301 ²",
    "",
)


def test_sources_have_a_tokenizer_of_their_own(native_build, opus):
    """Source texts to ids by one tokenizer, target texts by the other; codes of languages."""
    (found,) = ask(command_in(native_build), opus, [{"check": True}])
    assert (found["encodes"], found["decodes"]) == (True, True), found
    options = [
        {"num_beams": 3, "num_return_sequences": 3, **FIXED},
        {"draft_length": 3, **FIXED},
        {"strategy": "sample", "stop_strings": ["a", "ß"]},
        {"strategy": "speculative", "drafter": "ngram", "predicted_text": TARGETS[0], **FIXED},
    ]
    requests = [
        {"prompt": text, "options": {"seed": seed, "max_new_tokens": 12, **each}}
        for seed, text in enumerate(OPUS_SOURCES)
        for each in options
    ]
    native = NativeRequests(native_build, opus)
    with Pipeline.from_bundle(opus, num_threads=1) as pipe:
        assert assert_same_answers(native, pipe, requests) == len(requests)
        for text in UNKNOWN:
            (found,) = native.answers([{"prompt": text, "options": {}}])
            with pytest.raises(DsbdError) as refused:
                pipe.prepare(text, {})
            words = str(refused.value).partition(" has ")[0]
            assert found["error"] == f"{words} has 1, such as >>deu<<"
    native.close()


def test_any_source_texts(native_build, opus):
    tokenizer = Tokenizer.of_sources(open_bundle(opus))
    texts = [*random_texts(300, tokens=[">>deu<<", "</s>", "<unk>"]), *SOURCES, *TARGETS]
    texts += [f" >>deu<<{text}" for text in texts]
    answers = ask(command_in(native_build), opus, [{"source": text} for text in texts])
    assert answers == [tokenizer.encode(text) for text in texts]


def run(native_build, *arguments):
    command = [native_build / "dsbd_native", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_languages_by_the_command(native_build, translator, tmp_path):
    """Options of the command line and of lines; the messages are Python's."""
    text = "def read(path): return"
    options = {"src_lang": "fra_Latn", "tgt_lang": "zho_Hans", "num_beams": 2}
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    words = [word for each in named for word in each.split("=")]
    with Pipeline.from_bundle(translator, num_threads=1) as pipe:
        wanted = pipe.translate(text, **options)
        done = run(native_build, translator, "--prompt", text, "--json", *words)
        assert done.returncode == 0, done.stderr
        best = json.loads(done.stdout)["sequences"][0]
        assert best["token_ids"] == wanted.sequences[0].token_ids
        assert best["text"] == wanted.sequences[0].text
        lines = [
            {"prompt": text, **options},
            *({"prompt": text, **wrong} for wrong, _ in WRONG),
            {"ids": [5, 6, 1], "src_lang": "fra_Latn"},
            {"prompt": text, "prompt_logprobs": True},
            {"messages": [{"role": "user", "content": text}]},
            {"ids": [300]},
            {"ids": [3] * 10_000},
        ]
        (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
        done = run(native_build, translator, "--input", tmp_path / "lines")
        answer, *errors = map(json.loads, done.stdout.splitlines())
        assert answer["sequences"][0]["token_ids"] == wanted.sequences[0].token_ids
        for line, error in zip(lines[1:], errors, strict=True):
            prompt = line.pop("prompt", None) or line.pop("ids", None) or line.pop("messages")
            with pytest.raises(DsbdError) as refused:
                pipe.prepare(prompt, line)
            assert error["error"].split(",")[0] == str(refused.value).split(",")[0]


def test_a_language_of_a_decoder_is_refused(native_build, tiny_bundle):
    done = run(native_build, tiny_bundle.path, "--ids", "1", "--tgt-lang", "fra_Latn")
    assert done.returncode == 2 and "has no tokens for languages; leave it out" in done.stderr


REFUSED = [
    (["encoder", "speech"], "reads sound as its source (encoder: speech), which the native"),
    (["encoder", "picture"], "reads pictures as its source (encoder: picture), which the native"),
]
DAMAGES = [
    (["target", "encoder", "start_token_id"], 300, "expected a whole number from 0 to 299"),
    (["target", "encoder", "cross", 0, "num_heads"], 3, "cross.0.key"),
    (["target", "encoder", "cross"], [], "expected at least one"),
    (["target", "encoder", "languages"], {"x": 300}, "x is 300, expected a whole number from 0"),
    (["target", "encoder", "unknown_token_id"], -1, "expected a whole number"),
    (["target", "encoder", "is_shared"], True, "is_shared is true, expected null: it is"),
    (["target", "encoder", "future"], 1, "does not know; use the version that made the bundle"),
    (["target", "encoder"], None, "the draft of"),
    (["draft", "encoder", "reads_positions"], True, "row_positions"),
]


@pytest.mark.parametrize(("path", "words"), REFUSED)
def test_other_sources_are_refused_by_name(native_build, translator, tmp_path, path, words):
    """With what runs them: a bundle for Whisper, or one that reads pictures."""
    own = shutil.copytree(translator, tmp_path / "bundle")
    edited(own, put(["target", *path], {}))
    done = run(native_build, own, "--ids", "1")
    assert done.returncode == 2 and words in done.stderr
    assert "use dsbd-run, or libdsbd with Python" in done.stderr


@pytest.mark.slow
def test_whisper_is_refused_by_name(native_build, whisper):
    done = run(native_build, whisper / "bundle", "--ids", "1")
    assert done.returncode == 2 and REFUSED[0][1] in done.stderr


@pytest.mark.parametrize(("path", "value", "words"), DAMAGES)
def test_damaged_manifests(native_build, translator, tmp_path, path, value, words):
    own = shutil.copytree(translator, tmp_path / "bundle")
    edited(own, put(path, value))
    done = run(native_build, own, "--ids", "5,1")
    assert done.returncode == 2 and words in done.stderr, done.stderr
