"""The export tries native text where it finds the command, and writes what it found."""

from dsbd_export.config import ExportConfig
from dsbd_export.gate.native_text import VARIABLE, measured_native_text
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file


def test_the_export_writes_what_the_gate_found(small_llama_folder, captures, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\nsed 's/.*/[5]/'\n")
    wrong.chmod(0o755)
    config = ExportConfig(target=str(small_llama_folder), output=tmp_path / "bundle")
    monkeypatch.setenv(VARIABLE, str(wrong))
    export_bundle(config, report=lambda line: None, source_of=captures)
    found = manifest_from_file(tmp_path / "bundle" / MANIFEST_NAME).target.native_text
    assert found is not None and (found.encodes, found.decodes) == (False, False)
    assert "gives [5], in Python" in str(found.reason)
    for name in ("none", str(tmp_path)):  # nothing to run
        monkeypatch.setenv(VARIABLE, name)
        unrun = measured_native_text(tmp_path / "bundle", None, lambda line: None)
        assert unrun is not None and not unrun.encodes and unrun.reason
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", "")
    assert measured_native_text(tmp_path / "bundle", None, lambda line: None) is None
