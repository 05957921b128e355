"""An answer in one piece: wait for all results, keep the best of each prompt."""

from __future__ import annotations

from collections import defaultdict

from pydantic import BaseModel

from dsbd_ort.generated import GeneratedSequence, GenerationResult
from dsbd_ort.openai_server.answer_shape import (
    AnswerChoice,
    AnswerShape,
    TokenPieces,
    report_of,
    usage_of,
)
from dsbd_ort.openai_server.finish_reason import openai_finish_reason
from dsbd_ort.openai_server.generation import Generation
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.token_texts import TokenTexts
from dsbd_runtime.tokenizer import Tokenizer


async def whole_answer(
    generation: Generation,
    plan: GenerationPlan,
    shape: AnswerShape,
    *,
    tokenizer: Tokenizer | None,
) -> BaseModel:
    """Return the answer to a request that was submitted.

    ``tokenizer`` is given where log-probabilities are wanted.
    """
    result_by_index: dict[int, GenerationResult] = {}
    async for index, event in generation.events():
        if isinstance(event, GenerationResult):
            result_by_index[index] = event
    results = [result_by_index[index] for index in range(len(plan.submissions))]
    best = _best_of_each_prompt(plan, results)
    choices = [
        AnswerChoice(
            index=index,
            text=sequence.text,
            finish_reason=openai_finish_reason(sequence.finish_reason),
            tokens=None if tokenizer is None else token_pieces(tokenizer, sequence),
        )
        for index, sequence in enumerate(best)
    ]
    usage = usage_of(plan, sum(len(sequence.token_ids) for sequence in best))
    report = report_of(plan.seed, plan.strategy, [result.stats for result in results])
    return shape.whole(choices, usage, report)


def token_pieces(tokenizer: Tokenizer, sequence: GeneratedSequence) -> TokenPieces:
    """Return the tokens of a whole sequence with their texts."""
    texts = TokenTexts(tokenizer)
    pieces = (texts.push(sequence.token_ids, sequence.token_logprobs), texts.finish())
    found = [some for some in pieces if some is not None]
    return TokenPieces(
        [text for some in found for text in some.texts],
        [logprob for some in found for logprob in some.logprobs],
    )


def _best_of_each_prompt(
    plan: GenerationPlan, results: list[GenerationResult]
) -> list[GeneratedSequence]:
    """Return ``num_choices`` sequences a prompt, best first."""
    sequences_by_prompt: defaultdict[int, list[GeneratedSequence]] = defaultdict(list)
    for submission, result in zip(plan.submissions, results, strict=True):
        sequences_by_prompt[submission.prompt_index] += result.sequences
    return [
        sequence
        for _, sequences in sorted(sequences_by_prompt.items())
        for sequence in sorted(sequences, key=lambda each: -each.score)[: plan.num_choices]
    ]
