"""Word error rate of transcripts against the texts that were read."""

import unicodedata
from collections.abc import Iterable, Sequence


def words_of(text: str) -> list[str]:
    """Return the words of a text without case and punctuation: "Don't, well-known" has three."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("-", " ")
    kept = (letter for letter in folded if unicodedata.category(letter)[0] not in "PS")
    return "".join(kept).split()


def num_errors(found: Sequence[str], wanted: Sequence[str]) -> int:
    """Return the fewest words to replace, leave out or put in to make one text the other."""
    row = list(range(len(wanted) + 1))  # of the empty text
    for number, word in enumerate(found, 1):
        above, row[0] = row[0], number
        for place, other in enumerate(wanted, 1):
            replaced = above + (word != other)
            above = row[place]
            row[place] = min(replaced, above + 1, row[place - 1] + 1)
    return row[-1]


def word_error_rate(pairs: Iterable[tuple[str, str]]) -> float:
    """Return the errors of all (transcript, text) over the words of the texts."""
    as_words = [(words_of(found), words_of(wanted)) for found, wanted in pairs]
    num_words = sum(len(wanted) for _, wanted in as_words)
    return sum(num_errors(found, wanted) for found, wanted in as_words) / num_words
