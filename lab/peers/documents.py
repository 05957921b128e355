"""Check of answers against a JSON schema."""

import json
from decimal import Decimal

import jsonschema
from tokenizers import Tokenizer


class Documents:
    """Checks whether the tokens of an answer are a valid document of a schema."""

    def __init__(self, tokenizer: Tokenizer, end_token: int) -> None:
        """Set the tokenizer of the checkpoints and the token that ends a text."""
        self._tokenizer = tokenizer
        self._end_token = end_token

    def judged(self, token_ids: list[int], schema: str) -> tuple[list[int], bool]:
        """Return the tokens before the first end token, and whether they are a valid document."""
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
