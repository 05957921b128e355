"""The hook that makes a site of README.md, docs/ and the docstrings."""

from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

import dsbd_ort
from scripts.docs_site import api_reference, site_text

LINKS = [  # (file, link, as the site has it)
    ("README.md", "[a](docs/run.md)", "[a](run.md)"),
    ("README.md", "![a](docs/images/x.png)", "![a](images/x.png)"),
    ("README.md", "[a](docs/run.md#stop-strings)", "[a](run.md#stop-strings)"),
    ("README.md", "[a](CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
    ("README.md", "[a host](examples/native)", "a host"),
    ("CONTRIBUTING.md", "[a](README.md#license)", "[a](index.md#license)"),
    ("docs/performance.md", "[a](../lab/results/calls.md#x)", "[a](lab/results/calls.md#x)"),
    ("lab/README.md", "[a](results/calls.md)", "[a](results/calls.md)"),
    ("lab/README.md", "[a](../docs/gpu.md), [results](results)", "[a](../gpu.md), results"),
    ("lab/results/calls.md", "[a](speed.md), [b](../README.md)", "[a](speed.md), [b](../index.md)"),
    ("lab/results/calls.md", "![a](../../docs/images/x.png)", "![a](../../images/x.png)"),
    ("docs/gpu.md", "[a](run.md), [b](../README.md)", "[a](run.md), [b](index.md)"),
    ("docs/gpu.md", "[`dsbd.h`](../dsbd_ort/embedding/dsbd.h)", "`dsbd.h`"),
    ("docs/gpu.md", "[a](#checking), [b](https://x.y/z)", "[a](#checking), [b](https://x.y/z)"),
]


@pytest.mark.parametrize(("file", "text", "wanted"), LINKS)
def test_links_as_the_site_has_them(file, text, wanted):
    assert site_text(text, Path(file)) == wanted


def test_every_public_name_is_in_the_reference():
    page = api_reference()
    for name in dsbd_ort.__all__:
        assert name.startswith("__") or f".{name}\n" in page, name
    assert "::: dsbd_ort.pipeline.Pipeline\n" in page and "::: dsbd_errors.DsbdError\n" in page
