"""Judgement of answers under a JSON schema."""

import json
from decimal import Decimal

import jsonschema
from tokenizers import Tokenizer


class Documents:
    """Judges whether the tokens of an answer are a document that its schema allows."""

    def __init__(self, tokenizer: Tokenizer, end_token: int) -> None:
        """Take the tokenizer of the checkpoints, and the token that ends a text."""
        self._tokenizer = tokenizer
        self._end_token = end_token

    def judged(self, token_ids: list[int], schema: str) -> tuple[list[int], bool]:
        """Return the tokens before the first end, and whether they are a whole, valid document."""
        if self._end_token in token_ids:
            token_ids = token_ids[: token_ids.index(self._end_token)]
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        try:
            jsonschema.validate(
                *(json.loads(document, parse_float=Decimal) for document in (text, schema))
            )
        except (json.JSONDecodeError, jsonschema.ValidationError):
            return token_ids, False
        return token_ids, True
