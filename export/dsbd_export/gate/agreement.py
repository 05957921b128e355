"""Agreement of a draft with its target, measured on the target's answers to a few prompts.

The draft policy "throughput" starts from this measurement, so that it drafts the right number of
tokens from the first request of a process on. The answers are greedy and short. Tokens after an end
token are left out, because no request reads them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_export.gate.parity_engine import ParityEngine, as_export_errors, parity_engine
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.progress import Report
from dsbd_forward.forward import Forward
from dsbd_forward.rows import NO_INTS, Ints
from dsbd_runtime.bundle_files.bundle import ModelEntry
from dsbd_runtime.bundle_files.draft_record import DraftAgreement
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

_NEW_TOKENS = 32
_LEAST_PROMPT = 4  # tokens; nothing is measured if prompt and answer do not fit into the context
_MOST_PROBABLE = 64  # compared tokens of a row
_QUESTIONS = (  # for models that chat
    "Write a Python function that merges overlapping intervals.",
    "What is a harbour good for? Answer in a few sentences.",
    "Write a short email that moves a meeting from Monday to Thursday.",
)
_BEGINNINGS = (  # beginnings of texts, for other models
    'def merge_intervals(intervals):\n    """Return the union of the intervals."""\n',
    "The harbour wakes before the town does. Fishing boats come in with the tide, and",
    "Dear Anna,\n\nthank you for your letter. On Monday",
)
Floats = NDArray[np.float64]
_Rows = tuple[Ints, Floats]
"""The most probable tokens of rows, and their probabilities."""


def measured_agreement(
    folder: Path, target: ModelEntry, draft: ModelEntry, report: Report
) -> DraftAgreement | None:
    """Return the agreement of two exported engines; None if they do not continue plain text."""
    max_prompt = min(target.context_length, draft.context_length) - _NEW_TOKENS
    reads_more = target.encoder is not None or target.given is not None
    if reads_more or draft.reads_whole_path or max_prompt < _LEAST_PROMPT:
        return None
    prompts = [ids[-max_prompt:] for ids in _prompts(folder, target.bos_token_id)]
    if not all(prompts):  # the tokenizer makes no tokens of one of these texts
        return None
    report("draft: measuring its agreement with the target")
    bundle = unwritten_bundle(folder, "draft", draft, target)
    with parity_engine(bundle, "target") as engine, as_export_errors():
        answers, (wanted, target_mass) = _greedy_answers(engine, prompts)
    read = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    with parity_engine(bundle, "draft") as engine, as_export_errors():
        engine.model.keep(NO_INTS)
        proposed, draft_mass = _append(engine, [[] for _ in read], read, _NEW_TOKENS)
    is_end = np.isin(wanted[:, :, 0], target.eos_token_ids)
    is_read: NDArray[np.bool_] = np.cumsum(is_end, axis=1) - is_end == 0
    is_best = proposed[is_read][:, :4] == wanted[is_read][:, :1]
    is_same = wanted[is_read][:, :, None] == proposed[is_read][:, None, :]
    both = np.minimum(target_mass[is_read][:, :, None], draft_mass[is_read][:, None, :])
    return DraftAgreement(
        num_tokens=int(is_read.sum()),
        best=float(is_best[:, 0].mean()),
        overlap=float((both * is_same).sum(axis=(1, 2)).mean()),
        best_four=float(is_best.any(axis=1).mean()),
    )


def _prompts(folder: Path, bos_token_id: int | None) -> list[list[int]]:
    tokenizer = Tokenizer(folder, bos_token_id=bos_token_id)
    try:
        template = ChatTemplate.from_folder(folder)
        chats = [template.render([{"role": "user", "content": each}]) for each in _QUESTIONS]
    except (BundleError, InputError):  # no template, or it needs more than a question
        return [tokenizer.encode(each) for each in _BEGINNINGS]
    return [tokenizer.encode(each, add_special_tokens=False) for each in chats]


def _greedy_answers(
    engine: ParityEngine, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], _Rows]:
    """Return answers of ``_NEW_TOKENS`` and the rows that predicted them, (P, _NEW_TOKENS, K)."""
    engine.model.keep(NO_INTS)
    paths: list[list[int]] = [[] for _ in prompts]  # rows of the cache of each prompt
    steps = [_append(engine, paths, prompts, 1)]
    while len(steps) < _NEW_TOKENS:
        steps.append(_append(engine, paths, steps[-1][0][:, 0, :1].tolist(), 1))
    ids, mass = (np.concatenate(each, axis=1) for each in zip(*steps, strict=True))
    return ids[:, :, 0].tolist(), (ids, mass)


def _append(
    engine: ParityEngine, paths: list[list[int]], new: Sequence[Sequence[int]], num_returned: int
) -> _Rows:
    """Append the tokens ``new`` to every path; ``paths`` has each path's rows of the cache.

    Returns the last ``num_returned`` rows of each path, (num_paths, num_returned, K).
    """
    begin, num_new = engine.model.num_rows, sum(map(len, new))
    mask = np.zeros((num_new, begin + num_new), np.bool_)
    token_ids: list[int] = []
    positions: list[int] = []
    returned: list[int] = []
    for path, tokens in zip(paths, new, strict=True):
        for token in tokens:
            number = len(token_ids)
            token_ids.append(token)
            positions.append(len(path))
            path.append(begin + number)
            mask[number, path] = True
        returned += range(len(token_ids) - num_returned, len(token_ids))
    arrays = [np.array(each, np.int64) for each in (token_ids, positions, returned)]
    result = engine.model.forward(Forward(arrays[0], arrays[1], mask, arrays[2]))
    ids, logits = result.logits.most_probable(_MOST_PROBABLE)
    mass = np.exp(logits - result.logits.log_normalizers)
    shape = len(paths), num_returned, -1
    return ids.reshape(shape), mass.reshape(shape)
