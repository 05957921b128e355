"""Options of a distillation: numbers of parameters, and what is refused before anything is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dsbd_distill.config import DistillConfig
from dsbd_export.errors import ExportError

PARAMS = [("30M", 30_000_000), ("1.5m", 1_500_000), ("2B", 2 * 10**9), ("4000", 4000), ("8k", 8000)]


def config_of(**options: Any) -> DistillConfig:
    return DistillConfig(**{"target": "t", "data": ("d",), "output": Path("o"), **options})


@pytest.mark.parametrize(("text", "number"), PARAMS)
def test_numbers_of_parameters(text, number):
    assert config_of(params=text).num_params == number


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"params": "30 million"}, "params='30 million' is not a number of parameters"),
    ({"params": "0"}, "params='0' is not a number"),
    ({"params": "99999999B"}, "is not a number"),
    ({"params": "1M", "target_layers": 2}, "both choose the draft's shape"),
    ({"minutes": 0.0}, "minutes=0.0 is out of range"),
    ({"minutes": float("nan")}, "minutes=nan is out of range"),
    ({"steps": 0}, "steps=0 is out of range"),
    ({"seed": -1}, "seed=-1 is out of range"),
    ({"target_layers": 0}, "target_layers=0 is out of range"),
    ({"data": ()}, "data is missing"),
    ({"draft_vocab": 8}, "draft_vocab=8 is out of range; use 32 or more"),
    ({"coverage": 1}, "coverage=1 is out of range; use the number of beams, 2 to 16"),
    ({"coverage": 17}, "coverage=17 is out of range"),
    ({"kind": "medusa"}, "kind='medusa' is not known; use one of model, feature"),
    ({"kind": "feature", "target_layers": 1}, "target_layers=1 has no meaning for"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_options_that_are_refused(options, words):
    with pytest.raises(ExportError, match=re.escape(words)):
        config_of(**options)
