"""Every family on WebGPU: no node on the CPU and the CPU's logits, or the promised refusal."""

import re

import pytest

from lab.gpu.families import difference
from lab.gpu.family_bundles import Case, export_case
from scripts.family_checkpoints import CONVOLUTIONAL, ONE_OF_EACH, RECURRENT

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]

PROMISED = re.compile(
    r"the target \(family \w+\) cannot be exported with form='webgpu', which has no convolutions "
    r"and recurrences; use form='portable'"
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_family_has_the_logits_of_the_cpu_or_is_refused(name, captures, tmp_path):
    """Opening an engine refuses one with a node on the CPU."""
    case = Case(family=name, dtype="fp32", options={"form": "webgpu"})
    found = difference(export_case(case, tmp_path, captures), "webgpu")
    if name in (*RECURRENT, *CONVOLUTIONAL):
        assert PROMISED.fullmatch(found["reason"]), found
    else:
        assert found["reason"] == ""
        assert found["difference"] < 1e-4
