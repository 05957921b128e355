"""The pair that is shipped."""

from __future__ import annotations

import pytest

from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError


def test_the_folders_of_the_pair(tmp_path):
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / role / name).touch()
    assert demo_pair(tmp_path) == (tmp_path / "target", tmp_path / "draft")


def test_a_missing_file_is_named_with_the_mend(tmp_path):
    with pytest.raises(ExportError, match=r"no .*config\.json; install .*scripts/train_demo_pair"):
        demo_pair(tmp_path)
