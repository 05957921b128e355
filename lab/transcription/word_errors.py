"""Word error rate of transcripts compared with the texts that were read."""

import unicodedata
from collections.abc import Iterable, Sequence


def words_of(text: str) -> list[str]:
    """Return case-folded words without punctuation; "Don't, well-known" has three."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("-", " ")
    kept = (letter for letter in folded if unicodedata.category(letter)[0] not in "PS")
    return "".join(kept).split()


def num_errors(words: Sequence[str], expected_words: Sequence[str]) -> int:
    """Return the edit distance in words: fewest words to replace, delete or insert."""
    row = list(range(len(expected_words) + 1))  # costs for the empty text
    for number, word in enumerate(words, 1):
        above, row[0] = row[0], number
        for place, other in enumerate(expected_words, 1):
            replaced = above + (word != other)
            above = row[place]
            row[place] = min(replaced, above + 1, row[place - 1] + 1)
    return row[-1]


def word_error_rate(pairs: Iterable[tuple[str, str]]) -> float:
    """Return errors / words of the texts, over all pairs (transcript, text)."""
    as_words = [(words_of(transcript), words_of(text)) for transcript, text in pairs]
    num_words = sum(len(text) for _, text in as_words)
    return sum(num_errors(transcript, text) for transcript, text in as_words) / num_words
