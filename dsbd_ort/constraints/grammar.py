"""Specifications of grammars: regular expressions, choices, JSON, Lark grammars.

A specification is plain data: it can be compared, hashed and pickled, and needs no tokenizer.
``bind`` turns it into a constraint for the tokenizer of a bundle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsbd_ort.constraints.canonical_spelling import CanonicalConstraint
from dsbd_ort.constraints.grammar_matching import Grammar, GrammarTokenizer
from dsbd_ort.constraints.large_integers import crowded_parts, lark_of_schema
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Regex(Grammar):
    """Texts that a regular expression matches as a whole, in Rust's syntax without look-around."""

    pattern: str

    def __post_init__(self) -> None:
        _check_text(self.pattern, "a regex")

    @property
    def name(self) -> str:
        return f"the regex {_shown(self.pattern)}"

    def source(self, library: type[LLMatcher]) -> str:
        return library.grammar_from_regex(self.pattern)


@dataclass(frozen=True, slots=True)
class Choice(Grammar):
    """One of several texts, in any tokenization.

    ``TokenTrie`` holds millions of texts, each in one tokenization.

    texts: any iterable of strings; stored as a tuple.
    """

    texts: Iterable[str]

    def __post_init__(self) -> None:
        texts = () if isinstance(self.texts, str) else tuple(self.texts)
        if not texts:
            raise ConstraintError(f"the choice is {self.texts!r}; give a list of at least one text")
        for text in texts:
            _check_text(text, "a text of a choice")
        object.__setattr__(self, "texts", texts)

    @property
    def name(self) -> str:
        return f"the choice {_shown(', '.join(map(repr, self.texts)), quoted=True)}"

    def source(self, library: type[LLMatcher]) -> str:
        # one terminal: as alternatives of a rule, 20,000 texts take seconds to compile
        texts = " | ".join(json.dumps(text).replace("\x7f", "\\u007f") for text in self.texts)
        return library.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")


@dataclass(frozen=True, slots=True)
class Lark(Grammar):
    """Texts of a context-free grammar in llguidance's Lark syntax, from the rule ``start``."""

    grammar: str

    def __post_init__(self) -> None:
        _check_text(self.grammar, "a Lark grammar")

    @property
    def name(self) -> str:
        return f"the Lark grammar {_shown(self.grammar)}"

    def source(self, library: type[LLMatcher]) -> str:
        return library.grammar_from_lark(self.grammar)


@dataclass(frozen=True, slots=True)
class JsonSchema(Grammar):
    """JSON that matches a schema, on one line, so that a model cannot write white space forever.

    Attributes:
        schema: the schema, or its JSON text; stored as the text. Its key ``x-guidance`` may set
            options of llguidance; it overrides the attributes below. Properties must have the
            order of the schema.
        item_separator: text between the items of an array, and of an object.
        key_separator: text between a key and its value.
        flexible_whitespace: allow white space of any length between tokens of JSON.
    """

    schema: str | Mapping[str, Any]
    item_separator: str = ","
    key_separator: str = ":"
    flexible_whitespace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", _schema_text(self.schema))

    @property
    def name(self) -> str:
        return f"the JSON schema {_shown(str(self.schema), quoted=True)}"

    def source(self, library: type[LLMatcher]) -> str:
        return self._source_of(json.loads(str(self.schema)), library)

    def parts(self, library: type[LLMatcher]) -> list[str]:
        parts = crowded_parts(json.loads(str(self.schema)))
        return [self._source_of(part, library) for part in parts]

    def _source_of(self, schema: Mapping[str, Any], library: type[LLMatcher]) -> str:
        options: Any = {
            "item_separator": self.item_separator,
            "key_separator": self.key_separator,
            "whitespace_flexible": self.flexible_whitespace,
        }
        lark = lark_of_schema(schema, options)
        if lark is not None:
            return library.grammar_from_lark(lark)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        return library.grammar_from_json_schema(text, defaults=options)


@dataclass(frozen=True, slots=True)
class JsonObject(Grammar):
    """Any JSON object, on one line. The attributes are those of JsonSchema."""

    item_separator: str = ","
    key_separator: str = ":"
    flexible_whitespace: bool = False

    @property
    def name(self) -> str:
        return "the JSON object"

    def source(self, library: type[LLMatcher]) -> str:
        return JsonSchema(
            {"type": "object"}, self.item_separator, self.key_separator, self.flexible_whitespace
        ).source(library)


@dataclass(frozen=True, slots=True)
class FunctionCalls(Grammar):
    """A JSON list of 1 to ``max_calls`` calls, ``[{"name":"f","arguments":{...}}]``, on one line.

    Each schema stays a separate document, so that its references, ``$id`` and anchors do not
    depend on the others.

    functions: each function's name (letters, digits, ``_``, ``.``, ``-``) and argument schema.
    """

    functions: tuple[tuple[str, JsonSchema], ...]
    max_calls: int

    @property
    def name(self) -> str:
        return f"the calls of {_shown(', '.join(name for name, _ in self.functions), quoted=True)}"

    def source(self, library: type[LLMatcher]) -> str:
        calls, grammars = [], []
        for index, (name, schema) in enumerate(self.functions):
            begin = json.dumps(f'{{"name":"{name}","arguments":')
            calls.append(f'{begin} @f{index} "}}"')
            try:
                (grammar,) = _document(schema.source(library))["grammars"]
                grammars.append(json.dumps({**grammar, "name": f"f{index}"}))
            except RecursionError as error:
                raise ConstraintError(f"{schema.name} of {name} nests too deep") from error
        more = f'("," call){{0,{self.max_calls - 1}}}' if self.max_calls > 1 else ""
        rules = f'start: "[" call {more} "]"\ncall: {" | ".join(calls)}'
        return f'{{"grammars": [{", ".join([json.dumps({"lark_grammar": rules}), *grammars])}]}}'

    def parts(self, library: type[LLMatcher]) -> list[str]:
        schemas = [schema for _, schema in self.functions]
        of_schemas = [part for schema in schemas for part in schema.parts(library)]
        return [schema.source(library) for schema in schemas] + of_schemas


def _document(source: str) -> dict[str, Any]:
    if source.lstrip().startswith("{"):
        document: dict[str, Any] = json.loads(source)
        return document
    return {"grammars": [{"lark_grammar": source}]}


@dataclass(frozen=True, slots=True)
class AfterSpaces(Grammar):
    """Texts of a grammar after a number of spaces, which the tokenizer drops at the beginning.

    The text after them is tokenized like the first word of a text.
    """

    grammar: Grammar
    number: int

    @property
    def name(self) -> str:
        return self.grammar.name

    def source(self, library: type[LLMatcher]) -> str:
        whole = _document(self.grammar.source(library))
        first, *others = whole["grammars"]
        spaces = json.dumps(" " * self.number)
        begin = {"lark_grammar": f"start: {spaces} @after_spaces"}
        return json.dumps(
            {**whole, "grammars": [begin, {**first, "name": "after_spaces"}, *others]}
        )

    def parts(self, library: type[LLMatcher]) -> list[str]:
        return self.grammar.parts(library)


@dataclass(frozen=True, slots=True)
class Canonical:
    """Texts of a grammar in the tokenizer's own spelling; see ``canonical_spelling``."""

    grammar: Grammar

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise ConstraintError(
                f"Canonical got {_shown(repr(self.grammar), quoted=True)}; give a grammar, such as "
                "JsonSchema({'type': 'object'}); a trie has one spelling anyway"
            )

    @property
    def name(self) -> str:
        return self.grammar.name

    def bind(self, tokenizer: GrammarTokenizer) -> Constraint:
        return CanonicalConstraint(tokenizer.constraint(self.grammar), tokenizer.spelling)


ConstraintSpec = Grammar | Canonical
"""A constraint that needs a tokenizer before it can run."""


def after_spaces(spec: ConstraintSpec, number: int) -> ConstraintSpec:
    """Return the specification of the same texts with dropped spaces before them."""
    if isinstance(spec, Canonical) and number:
        return Canonical(AfterSpaces(spec.grammar, number))
    return AfterSpaces(spec, number) if number and isinstance(spec, Grammar) else spec


def _schema_text(schema: object) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str | bytes) else schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConstraintError(
            f"the JSON schema {_shown(str(schema))} is not valid JSON: {error}"
        ) from error
    if not isinstance(value, Mapping):
        raise ConstraintError(
            f"the JSON schema {_shown(text)} is not an object; give one such as "
            "{'type': 'string'}"
        )
    _check_text(text, "a JSON schema")
    return text


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise ConstraintError(f"{what} is {_shown(repr(value), quoted=True)}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(
            f"{what}, {_shown(value)}, has a lone surrogate, which is not a character"
        ) from error


def _shown(text: str, *, quoted: bool = False) -> str:
    short = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return short if quoted else repr(short)
