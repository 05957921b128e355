"""Request of /v1/audio/transcriptions and /v1/audio/translations: OpenAI's multipart form."""

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import UploadFile
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.request_limits import check_limit
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.speech.formats import WITH_TIMES
from dsbd_ort.speech.hot_words import MOST_WORDS
from dsbd_ort.speech.speech_request import WORD_TIMES, check_word_times
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.speech_entry import SpeechEntry

_OF_HTTP = {
    *("file", "model", "prompt", "response_format", "temperature", "timestamp_granularities"),
    *("include", "chunking_strategy", "user", "stream"),
}
"""Fields that are not keywords of ``Pipeline.transcribe``; all others are."""


def _list(name: str) -> AliasChoices:
    """Return both names of a field that may be repeated, as OpenAI accepts both."""
    return AliasChoices(f"{name}[]", name)


class SpeechForm(BaseModel):
    """The fields of a request; those below ``stream`` are not OpenAI's."""

    model_config = ConfigDict(extra="forbid")
    file: UploadFile
    model: str
    language: str | None = Field(None, max_length=64)
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, validation_alias=_list("timestamp_granularities"), max_length=2
    )
    include: list[str] | None = Field(None, validation_alias=_list("include"), max_length=8)
    chunking_strategy: str | None = None
    user: str | None = None
    stream: bool | None = None
    num_beams: int | None = Field(None, ge=1)
    length_penalty: float | None = Field(None, allow_inf_nan=False)
    seed: int | None = None
    condition_on_previous_text: bool | None = None
    compression_ratio_threshold: float | None = Field(None, allow_inf_nan=False)
    logprob_threshold: float | None = Field(None, allow_inf_nan=False)
    no_speech_threshold: float | None = Field(None, allow_inf_nan=False)

    best_of: int | None = Field(None, ge=1)
    num_return_sequences: int | None = Field(None, ge=1)
    hot_words: list[str] | None = Field(
        None, validation_alias=_list("hot_words"), max_length=MOST_WORDS
    )
    hot_word_gain: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)

    @property
    def format(self) -> str:
        """Name of the response's format in ``dsbd_ort.speech.formats``."""
        return "txt" if self.response_format == "text" else self.response_format

    def check(self, settings: ServingSettings, speech: SpeechEntry) -> None:
        """Raise ErrorResponse for fields that this server or its model does not support."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise bad_request(
                "timestamp_granularities[] needs response_format verbose_json, but response_format "
                f"is {self.response_format}; set it, or leave timestamp_granularities[] out",
                "timestamp_granularities",
            )
        if WORD_TIMES in (self.timestamp_granularities or ()):
            try:
                check_word_times(speech)
            except InputError as error:
                raise bad_request(str(error), "timestamp_granularities", "unsupported") from error
        if self.include:
            raise bad_request(
                f"include[] has {self.include[0]!r}, which is not returned; leave it out: "
                "verbose_json has the mean log-probability of every segment",
                "include",
                "unsupported",
            )
        if self.chunking_strategy not in (None, "auto"):
            raise bad_request(
                "this value of chunking_strategy is not supported: the model reads windows of its "
                "own length; leave it out or use auto",
                "chunking_strategy",
                "unsupported",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise bad_request(
                f"stream is true, but response_format {self.response_format} cannot be streamed; "
                "use json or text, or leave stream out",
                "stream",
            )
        if (self.num_return_sequences or 1) > 1 and self.response_format != "verbose_json":
            raise bad_request(
                f"num_return_sequences is {self.num_return_sequences}, but response_format is "
                f"{self.response_format}: only verbose_json has several texts of a window, in its "
                "field dsbd; use it, or leave num_return_sequences out",
                "num_return_sequences",
            )
        check_limit("num_beams", self.num_beams or 1, settings.max_beams)
        check_limit("best_of", self.best_of or 1, settings.max_best_of)
        check_limit("num_return_sequences", self.num_return_sequences or 1, settings.max_best_of)

    def options(self, task: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of ``Pipeline.transcribe``; ``defaults``: those of the server."""
        given = {name: value for name, value in self if name not in _OF_HTTP and value is not None}
        options = {**defaults, **given, "task": task}
        if self.prompt:
            options["initial_prompt"] = self.prompt
        if self.temperature:  # 0 is OpenAI's default: higher temperatures only if a window fails
            options["temperature"] = (self.temperature,)
        elif self.temperature is None and "temperature" in defaults:
            options["temperature"] = (defaults["temperature"],)
        else:
            options.pop("temperature", None)
        if WORD_TIMES in (self.timestamp_granularities or ()):
            options["return_timestamps"] = WORD_TIMES
        elif self.format in WITH_TIMES:
            options["return_timestamps"] = True
        return options
