"""Constraints in a request: OpenAI's response_format, vLLM's structured_outputs, ``constraint``."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.constraints.binding import constraint_from_data
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.openai_server.bodies import Entries
from dsbd_ort.openai_server.errors import ErrorResponse, bad_request


class SchemaFormat(BaseModel):
    """The schema of a response format; every answer follows it, ``strict`` or not."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def constraint(self) -> dict[str, Any] | None:
        """Return the constraint as plain data, None for any text."""
        if self.json_schema is not None and self.type != "json_schema":
            raise bad_request(
                f"response_format has json_schema, but type {self.type}; use type json_schema",
                "response_format",
            )
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise bad_request(
                "response_format.json_schema.schema is missing, which type json_schema needs",
                "response_format",
            )
        return {"json_schema": self.json_schema.schema_}


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``: exactly one of the first five fields.

    The default of ``disable_any_whitespace`` is true here.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Entries[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None

    def constraint(self) -> dict[str, Any] | None:
        given = {
            "json_schema": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
        }
        data = {name: value for name, value in given.items() if value is not None}
        if self.disable_any_whitespace is False and ("json_schema" in data or self.json_object):
            data["flexible_whitespace"] = True
        return data


class ConstraintFields(BaseModel):
    """The fields of a body that may give a constraint."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    constraint: dict[str, Any] | None = None

    @property
    def may_take_long(self) -> bool:
        """Whether a grammar may have to be compiled before the request can be queued."""
        return bool(self.given_constraints())

    def given_constraints(self) -> dict[str, dict[str, Any]]:
        """Return the constraints that are given, as plain data, by their fields."""
        data_by_field: dict[str, Any] = {
            "response_format": self.response_format and self.response_format.constraint(),
            "structured_outputs": self.structured_outputs and self.structured_outputs.constraint(),
            "guided_json": _of("json_schema", self.guided_json),
            "guided_regex": _of("regex", self.guided_regex),
            "guided_choice": _of("choice", self.guided_choice),
            "guided_grammar": _of("grammar", self.guided_grammar),
            "constraint": self.constraint,
        }
        return {field: data for field, data in data_by_field.items() if data is not None}


def _of(kind: str, value: object) -> dict[str, Any] | None:
    return None if value is None else {kind: value}


def read_constraint(
    given: Mapping[str, Any],
    tries: Mapping[str, TokenTrie],
    bind: Callable[[Any], object],
) -> Any:
    """Return the constraint of a request, None without one; raise ErrorResponse for several.

    given: by field, the constraint that it gives, or its plain data.
    bind: raises a ConstraintError if the model cannot follow a constraint.
    """
    if len(given) > 1:
        first, second, *_ = given
        raise bad_request(
            f"{first} and {second} contradict each other: a request has one constraint; leave out "
            "one of them",
            second,
        )
    for field, data in given.items():
        try:
            constraint = data
            if isinstance(data, Mapping):
                constraint = constraint_from_data(data, lambda name: _named_trie(name, tries))
            bind(constraint)
            return constraint
        except ConstraintError as error:
            prefix = "" if str(error).startswith(field) else f"{field}: "
            raise bad_request(f"{prefix}{error}", field) from error
    return None


def _named_trie(name: str, tries: Mapping[str, TokenTrie]) -> TokenTrie:
    if name in tries:
        return tries[name]
    expected = f"expected one of {', '.join(sorted(tries))}" if tries else "this server has none"
    raise ConstraintError(f"constraint has trie {name!r}; {expected} (dsbd-serve --trie NAME=FILE)")


def contradiction(tool_choice: str, given: Mapping[str, Any]) -> ErrorResponse:
    """Return the response to a request with tools and another constraint."""
    field = next(iter(given))
    return bad_request(
        f"{field} and tool_choice {tool_choice} contradict each other: both constrain the "
        "answer; leave out one of them",
        field,
    )
