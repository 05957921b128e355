"""Arguments of a C caller become Python values, or an error of one line."""

from pathlib import Path

import pytest

from dsbd_errors import DsbdError
from dsbd_ort.embedding.calls import decoded, json_messages, json_object, opening
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.pipeline import PipelineSettings
from dsbd_runtime.errors import InputError


def test_settings_are_those_of_the_pipeline_and_of_the_service():
    asked = opening("b\u00fcndel".encode(), b'{"num_threads": null, "verify": true, "kv_bytes": 9}')
    pipeline = PipelineSettings(bundle=Path("b\u00fcndel"), verify=True)
    assert asked == (pipeline, ServiceLimits(kv_bytes=9))


def test_nothing_given_means_the_defaults():
    assert opening(b"x", None)[1] == ServiceLimits()
    assert json_object("options", None) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (b'{"threads": 1}', "settings has 'threads'; did you mean 'num_threads'?"),
        (b'{"num_threads": true}', "num_threads is True; expected a whole number"),
        (b'{"num_threads": 1.5}', "num_threads is 1.5; expected a whole number"),
        (b'{"provider": null}', "provider is None; expected a text"),
        (b'{"verify": 1}', "verify is 1; expected"),
        (b'{"verify": %s}' % (b"[" * 900 + b"]" * 900), "verify is .*; expected"),
        (b'{"num_threads": %s}' % (b"9" * 5000), r"settings is invalid JSON \(Exceeds the limit"),
        (b"", "settings is invalid JSON"),
        (b"[" * 100_000, r"settings is invalid JSON \(maximum recursion depth"),
        (b"7", "settings is 7; expected a JSON object"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(DsbdError, match=message):
        opening(b"x", settings)


def test_what_is_shown_of_a_long_text_is_short():
    with pytest.raises(InputError) as raised:
        json_messages(b'"' + b"x" * 1000 + b'"')
    assert len(str(raised.value)) < 150


def test_bytes_that_are_no_utf_8_are_counted():
    with pytest.raises(InputError, match="prompt is invalid UTF-8: byte 0x80 at 2"):
        decoded("prompt", b"ab\x80")
