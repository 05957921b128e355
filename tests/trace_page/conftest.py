"""Traced requests to a tiny pair, once for all tests of the page."""

import pytest

from dsbd_ort import GenerationResult, Pipeline, RequestTrace
from dsbd_ort.trace_page.trace_file import trace_object

# A text that would end the element which holds it, and the line ends that JavaScript once forbade.
PROMPT = "a</script><script>console.error(1)</script><!--\u2028é\t"
STRATEGIES = ("dsbd", "speculative", "beam-search", "mjsd")


@pytest.fixture(scope="package")
def pipeline(tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="package")
def requests(pipeline) -> dict[str, tuple[RequestTrace, GenerationResult, dict]]:
    """By strategy: the trace, the result, and the page's JSON."""
    done = {}
    for strategy in STRATEGIES:
        trace = RequestTrace()
        options = {"strategy": strategy, "max_new_tokens": 24, "eos_token_id": 3, "seed": 0}
        options["draft_policy"] = "fixed"  # the same forest every time
        result = pipeline.generate(PROMPT, trace=trace, **options)
        done[strategy] = trace, result, trace_object(trace, pipeline.tokenizer)
    return done
