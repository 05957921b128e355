"""Any value of any keyword that opens a bundle, starts a service or translates: used or refused.

What is refused is a DsbdError of one line, and not an internal one.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import DecodingConfig, Pipeline, Service, ServiceLimits
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.pipeline_options import PipelineOptions
from tests.robustness.odd_values import ODD_VALUES, SENSIBLE

OPENING = sorted(PipelineOptions.__dataclass_fields__)


def refused(call):
    """Return whether a call is refused, by a message of one line."""
    try:
        call()
    except DsbdError as error:
        assert not isinstance(error, InternalError), error
        message = str(error)
        assert 10 < len(message) < 1000 and "\n" not in message
        return True
    return False


@pytest.mark.parametrize("name", OPENING)
def test_every_odd_value_that_opens_a_bundle(small_bundle, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # a text may name a folder of engines
    num_refused = sum(
        refused(lambda value=value: Pipeline.from_bundle(small_bundle, **{name: value}).close())
        for value in ODD_VALUES
    )
    assert num_refused > len(ODD_VALUES) / 2


def test_odd_paths_and_names():
    for value in ODD_VALUES:
        assert refused(lambda value=value: Pipeline.from_bundle(value))
        assert refused(lambda value=value: PipelineOptions.of({"threads": value}))


WRONG = [
    ({"threads": 1}, "unknown option 'threads'; did you mean 'num_threads'"),
    ({"device": 1}, "unknown option 'device'; expected one of provider, draft_provider, num_thr"),
    ({"num_threads": "4"}, "num_threads is '4'; expected a whole number"),
    ({"num_threads": 0}, "num_threads is 0; expected at least 1"),
    ({"spin_us": 0.5}, "spin_us is 0.5; expected a whole number"),
    ({"ngram_pool": -1}, "ngram_pool is -1; expected at least 0"),
    ({"verify": "no"}, "verify is 'no'; expected one of False, True"),
    ({"prefix_cache": 1}, "prefix_cache is 1; expected one of False, True"),
    ({"provider": None}, "provider is None; expected a text"),
    ({"draft_provider": 5}, "draft_provider is 5; expected a text"),
    ({"engine_cache": "a\0b"}, r"engine_cache is 'a\\x00b'; expected the path of a folder"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_what_opens_a_bundle_is_named(small_bundle, options, words):
    with pytest.raises(DsbdError, match=words):
        Pipeline.from_bundle(small_bundle, **options)


def test_what_is_numpys_or_a_path_is_taken(small_bundle, tmp_path):
    options = PipelineOptions(num_threads=np.int64(1), verify=np.bool_(True), engine_cache=tmp_path)
    assert (options.num_threads, options.verify) == (1, True)
    assert type(options.num_threads) is int and options.engine_cache == str(tmp_path)
    with pytest.raises(DsbdError, match="the bundle is 5; expected the path of a folder"):
        Pipeline.from_bundle(5)


def test_the_documentation_shows_every_keyword_and_its_default():
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    shown = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            shown[cells[1].strip("`")] = ast.literal_eval(cells[2].strip("`"))
    assert shown == vars(PipelineOptions())


@pytest.mark.parametrize("name", sorted(ServiceLimits.__dataclass_fields__))
def test_every_odd_limit(name):
    for value in ODD_VALUES:
        refused(lambda value=value: ServiceLimits(**{name: value}))


@pytest.fixture(scope="module")
def service(small_bundle):
    with Pipeline.from_bundle(small_bundle, num_threads=1) as pipe, Service(pipe) as running:
        yield running


NAMES = sorted({*DecodingConfig.__dataclass_fields__, "src_lang", "tgt_lang"})
options_of_requests = st.lists(st.sampled_from(NAMES), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: st.sampled_from([*SENSIBLE.get(name, ["fra_Latn"]), *ODD_VALUES]) for name in names}
    )
)
prompts = st.one_of(
    st.just("ab"),
    st.lists(st.sampled_from([1, 5, -1, 2**63, True, 1.5, None, np.uint8(7)]), max_size=3),
    st.sampled_from(ODD_VALUES),
)
HERE = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@HERE
@given(prompt=prompts, options=options_of_requests)
def test_any_request_of_a_service(service, prompt, options):
    refused(lambda: service.generate(prompt, **{"max_new_tokens": 2, **options}))


@HERE
@given(prompt=prompts, options=options_of_requests)
def test_any_translation(source_pipe, prompt, options):
    refused(lambda: source_pipe.translate(prompt, **{"max_new_tokens": 2, **options}))
