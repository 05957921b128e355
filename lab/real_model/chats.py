"""Chats that a draft is distilled from: prompts of everyday work, made by a seed.

The registry has no texts of chats, and none are needed: the target answers the prompts itself. They
are forms filled with things, so that the same question is hardly ever asked twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_TOPICS = """photosynthesis|the water cycle|supply and demand|a binary search|the French Revolution
plate tectonics|how vaccines work|the solar system|black holes|compound interest
recursion|inflation|the human heart|how a battery works|the Roman Empire|climate change
machine learning|the immune system|how bread rises|the Silk Road|gravity
the printing press|how rainbows form|the stock market|DNA|how airplanes fly
the Renaissance|sleep|how the internet works|democracy|volcanoes|the moon landing
a hash table|the industrial revolution|how bees make honey|electric cars
the periodic table|poetry|tides|the Great Wall of China|how a camera works
the nervous system|evolution|a relational database|public transport|the ozone layer
how earthquakes are measured|antibiotics|coral reefs|jazz|chess|the Cold War
renewable energy|how glass is made|the seasons|nutrition|the speed of light|a compiler
time zones|how a refrigerator works|the Olympic Games|impressionism|probability
the greenhouse effect|version control|how clouds form|world trade|the brain|magnetism
sound waves|origami|cryptography"""
_PEOPLE = (
    "a child|a beginner|a high school student|my grandmother|an engineer|a tourist|a new colleague"
)
_THINGS = """a rainy day|a lost key|an old lighthouse|a cat that talks|a journey by train
the first snow|a small bakery|a robot gardener|a letter from the past|a quiet village
two friends|a storm at sea|a broken clock|a market in the morning|a long night
a forgotten song|the last bus|a new neighbour"""
_WORK = """a delayed project|a meeting next Monday|a job application|a refund|a birthday party
vacation|a broken laptop|an invoice that was not paid|thanks after an interview
a change of address|feedback|a product launch|a training course
a request for a reference|an apology for a late reply|a reservation"""
_CODE = """reverses a string|finds the largest number in a list|counts words in a text
checks a palindrome|sorts a list of dictionaries by a key|reads a CSV file
computes a factorial|removes duplicates|merges two sorted lists
validates an email address|computes Fibonacci numbers|flattens a nested list
finds prime numbers below n|converts Celsius to Fahrenheit|downloads a page
parses a date"""
_SENTENCES = """The meeting was moved to Thursday because the room was not available.
She bought three apples and two pears at the market on Sunday.
The new library opens in May and will have more than ten thousand books.
Our train was late, so we missed the first part of the concert.
The company plans to hire twenty engineers before the end of the year.
He repaired the old bicycle and gave it to his younger sister.
Heavy rain is expected tonight, and some roads may be closed.
The recipe needs two eggs, a cup of flour and a pinch of salt.
They walked along the river until they reached the stone bridge.
The museum is closed on Mondays but open late on Fridays."""
_LANGUAGES = "French|Spanish|German|Italian|Portuguese"
_FEELINGS = "happy|formal|friendly|short|polite|surprised"

_FORMS: dict[str, tuple[str, ...]] = {
    "topic": (
        "Explain {topic} to {person}.",
        "What is the most important thing to know about {topic}?",
        "Give me three facts about {topic}.",
        "Why does {topic} matter?",
        "Write a short paragraph about {topic}.",
        "List the advantages and disadvantages of {topic}.",
        "How would you teach {topic} in one lesson?",
        "What are common misunderstandings about {topic}?",
    ),
    "thing": (
        "Write a short story about {thing}.",
        "Write a poem about {thing}.",
        "Suggest five titles for a book about {thing}.",
        "Describe {thing} in two sentences.",
    ),
    "work": (
        "Write a {feeling} email about {work}.",
        "Draft a {feeling} message to my manager about {work}.",
        "What should I say in a phone call about {work}?",
    ),
    "code": (
        "Write a Python function that {code}.",
        "Write a function that {code} and explain how it works.",
        "How do I write a program that {code}?",
    ),
    "sentence": (
        "Translate to {language}: {sentence}",
        "Rewrite this in a {feeling} way: {sentence}",
        "Summarize in five words: {sentence}",
        "Is this sentence positive, negative or neutral? {sentence}",
        "List the nouns in this sentence: {sentence}",
    ),
    "number": (
        "What is {a} plus {b}?",
        "I have {a} dollars and spend {b}. How much is left? Explain each step.",
        "A train travels {a} kilometres in {b} hours. How fast is it?",
        "What is {b} percent of {a}?",
    ),
}


def write_chats(file: Path, count: int, seed: int = 0) -> None:
    """Write so many chats, a line each; some have a second question behind a short answer."""
    rng = np.random.default_rng(seed)
    lines = itertools.islice(_distinct(rng), count)
    file.write_text("".join(f"{json.dumps({'messages': m})}\n" for m in lines), encoding="utf-8")


def _distinct(rng: np.random.Generator) -> Iterator[list[dict[str, str]]]:
    seen: set[str] = set()
    while True:
        question = _question(rng)
        if question in seen:
            continue
        seen.add(question)
        messages = [{"role": "user", "content": question}]
        if rng.random() < 0.1:
            messages += [
                {"role": "assistant", "content": "Sure, here is a short answer."},
                {"role": "user", "content": "Please say it in other words."},
            ]
        yield messages


def _question(rng: np.random.Generator) -> str:
    def one(text: str) -> str:
        return str(rng.choice(text.replace("\n", "|").split("|")))

    form = str(rng.choice(_FORMS[str(rng.choice(list(_FORMS)))]))
    return form.format(
        topic=one(_TOPICS),
        person=one(_PEOPLE),
        thing=one(_THINGS),
        work=one(_WORK),
        code=one(_CODE),
        sentence=one(_SENTENCES),
        language=one(_LANGUAGES),
        feeling=one(_FEELINGS),
        a=int(rng.integers(10, 500)),
        b=int(rng.integers(2, 99)),
    )
