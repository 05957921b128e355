"""Constraints of the generated tokens: a list of sequences, a grammar or a user's function.

TokenTrie                            token sequences: item ids, labels, names
Regex, Choice, JsonSchema, Lark ...  grammars: specifications that a GrammarTokenizer binds
AllowedTokens                        a function of the path
"""

from dsbd_ort.constraints.callback import AllowedTokens
from dsbd_ort.constraints.grammar import (
    Canonical,
    Choice,
    ConstraintSpec,
    FunctionCalls,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
)
from dsbd_ort.constraints.grammar_matching import GrammarTokenizer
from dsbd_ort.constraints.token_trie import TokenTrie

__all__ = [
    "AllowedTokens",
    "Canonical",
    "Choice",
    "ConstraintSpec",
    "FunctionCalls",
    "GrammarTokenizer",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Regex",
    "TokenTrie",
]
