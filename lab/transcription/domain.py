"""Word errors on sentences of one domain, with and without a language model of the domain.

domain.txt has sentences on chemistry in three paragraphs: to estimate the model, to choose its
weights, and to measure. No sentence is in two paragraphs, but most rare words are.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dsbd_ort import Pipeline
from dsbd_ort.scorers import LanguageModel
from dsbd_ort.scorers.ngram_files import BEGIN, END, UNKNOWN
from dsbd_ort.speech.speech_request import heard_windows
from dsbd_runtime.parts.source.speech_entry import SoundFeatures
from lab.transcription.speech import Spoken, Utterance, spoken
from lab.transcription.word_errors import num_errors, words_of
from scripts.document_sections import table

TEXTS = Path(__file__).with_name("domain.txt")
VOICES = (("en-us", 120), ("en", 130), ("en-us+f3", 120), ("en+m3", 130))  # words a minute
GRID = ((0.2, -10.0), (0.2, -2.0), (0.4, -2.0))  # (weight, offset of unknown words)
SETTINGS: dict[str, Any] = {"language": "en", "temperature": 0.0, "max_new_tokens": 64}
COLUMNS = ("language model", "length_penalty", "chosen on", "measured", "better", "worse")


def paragraphs(path: Path = TEXTS) -> list[list[str]]:
    """Return the sentences for the model, for the choice of weights, and for the measurement."""
    return [part.splitlines() for part in path.read_text(encoding="utf-8").strip().split("\n\n")]


def arpa(sentences: Iterable[Sequence[str]], order: int = 3) -> str:
    """Return an ARPA model of words, interpolated with Witten-Bell smoothing (1991)."""
    follows: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for words in sentences:
        padded = [BEGIN, *words, END]
        for place in range(1, len(padded)):
            for length in range(min(order, place + 1)):
                follows[tuple(padded[place - length : place])][padded[place]] += 1
    vocabulary = [*follows[()], UNKNOWN]

    def backoff(context: tuple[str, ...]) -> float:
        return len(follows[context]) / (len(follows[context]) + follows[context].total())

    def probability(context: tuple[str, ...], word: str) -> float:
        lower = probability(context[1:], word) if context else 1 / len(vocabulary)
        share = follows[context][word] / max(follows[context].total(), 1)
        return backoff(context) * lower + (1 - backoff(context)) * share

    by_order: list[list[str]] = [[] for _ in range(order)]
    grams = [(context, word) for context in [*follows] for word in [*follows[context]]]
    for context, word in [((), BEGIN), ((), UNKNOWN), *grams]:
        gram = (*context, word)
        log10 = -99.0 if word == BEGIN else math.log10(probability(context, word))
        ends = [f"{math.log10(backoff(gram)):.6f}"] if gram in follows else []
        by_order[len(context)].append("\t".join([f"{log10:.6f}", " ".join(gram), *ends]))
    sizes = [f"ngram {n}={len(lines)}" for n, lines in enumerate(by_order, 1)]
    sections = [f"\n\\{n}-grams:\n" + "\n".join(lines) for n, lines in enumerate(by_order, 1)]
    return "\n".join(["\\data\\", *sizes, *sections, "\n\\end\\\n"])


def errors_of(
    pipe: Pipeline, files: Sequence[Spoken], several: Sequence[dict[str, Any]]
) -> list[tuple[int, ...]]:
    """Return for each of the options the word errors in each file; a file is encoded once."""
    assert pipe.prompts.encoder is not None and pipe.prompts.encoder.speech is not None
    of_files = []
    for file in files:
        [window] = heard_windows(file.path, pipe.prompts.encoder.speech)
        with pipe.models.held_source(SoundFeatures(window)):
            texts = [pipe.transcribe(file.path, **SETTINGS, **each).text for each in several]
        of_files.append([num_errors(words_of(t), words_of(file.utterance.text)) for t in texts])
    return [*zip(*of_files, strict=True)]


def rate(errors: Sequence[int], files: Sequence[Spoken]) -> str:
    """Return errors / words of the texts, as text."""
    return f"{sum(errors) / sum(len(words_of(each.utterance.text)) for each in files):.1%}"


def utterances_of(name: str, texts: Sequence[str]) -> list[Utterance]:
    """Return texts as utterances that the voices read in turn."""
    voices = itertools.cycle(VOICES)
    return [
        Utterance(name=f"{name}-{n:02}", language="en", voice=v, words_per_minute=pace, text=text)
        for n, (text, (v, pace)) in enumerate(zip(texts, voices, strict=False), 1)
    ]


def domain_table(
    pipe: Pipeline, work: Path, python: Path, report: Callable[[str], None]
) -> list[str]:
    """Return the lines of the section; speech and language model are kept in ``work``."""
    train, *others = paragraphs()
    tuning, measured = (
        spoken(work / "domain", utterances_of(name, texts), python)
        for name, texts in zip(("tune", "test"), others, strict=True)
    )
    file = work / "domain.arpa"
    file.write_text(arpa(words_of(text) for text in train), encoding="utf-8")
    usual = LanguageModel(file, weight=0.5, unknown_offset=-10.0)  # defaults of CTC decoders
    options: list[dict[str, Any]] = [{}, {"length_penalty": 0.0}, {"scorers": [usual]}]
    for weight, offset in GRID:
        model = LanguageModel(file, weight=weight, unknown_offset=offset)
        options.append({"scorers": [model], "length_penalty": 0.0})
    chosen_on = errors_of(pipe, tuning, options)
    for each, errors in zip(options, chosen_on, strict=True):
        report(f"{each}: {rate(errors, tuning)}")
    best = min(range(-len(GRID), 0), key=lambda place: sum(chosen_on[place]))
    options, chosen_on = [*options[:3], options[best]], [*chosen_on[:3], chosen_on[best]]
    test_errors = errors_of(pipe, measured, options)
    rows = []
    for each, before, errors in zip(options, chosen_on, test_errors, strict=True):
        [model] = each.get("scorers", ["none"])
        name = str(model).rpartition(".arpa', ")[2].rstrip(")")
        pairs = [*zip(errors, test_errors[0], strict=True)]
        counts = [sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)]
        rates = rate(before, tuning), rate(errors, measured)
        rows.append((name, f"{each.get('length_penalty', 1.0)}", *rates, *map(str, counts)))
    return [*table(COLUMNS, rows)]
