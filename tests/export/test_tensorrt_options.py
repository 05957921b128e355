"""Options of TensorRT builds: refusals, defaults, and the cache of kernel times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.tensorrt.tensorrt_build import (
    load_timing_cache,
    save_timing_cache,
    timing_cache_file,
)
from dsbd_export.tensorrt.tensorrt_options import BuildPlace, TensorrtOptions, build_place
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, import_trt, version_numbers

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "openvino"}, "engine='openvino' is not known; use one of onnx, tensorrt, "),
    ({"engine": "onnx", "capacity": 512}, "capacity=512 has no meaning for engine='onnx'"),
    ({"compute_capability": "12.0"}, "compute_capability='12.0' has no meaning"),
    ({"engine": "tensorrt-rtx", "quantize": "int8"}, "runs on ONNX Runtime only"),
    ({"engine": "tensorrt-rtx", "compute_capability": "sm_120"}, "use one like 12.0"),
    ({"engine": "tensorrt-rtx", "capacity": 255}, "multiple of 64, 256 or more"),
    ({"engine": "tensorrt-rtx", "capacity": 300}, "multiple of 64, 256 or more"),
]
FAKE_TRT = SimpleNamespace(
    __version__="1.7.1",
    ComputeCapability=SimpleNamespace(
        __members__=dict.fromkeys(["NONE", "CURRENT", "SM89", "SM120"])
    ),
)


def place_for(engine: str, wanted: str | None, here: str | None) -> BuildPlace:
    options = TensorrtOptions(engine=engine, compute_capability=wanted)
    fake: Any = FAKE_TRT
    return build_place(options, here=lambda _: here, import_module=lambda _: fake)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ExportError) as error:
        ExportConfig(target="t", draft="d", output=Path("o"), **options)
    assert words in str(error.value)


def test_an_export_hands_its_options_on():
    config = ExportConfig(
        target="t", draft="d", output=Path("o"), engine="tensorrt-rtx", capacity=512
    )
    assert config.tensorrt == TensorrtOptions(engine="tensorrt-rtx", capacity=512)
    assert ExportConfig(target="t", draft="d", output=Path("o")).tensorrt is None


@pytest.mark.parametrize(
    ("engine", "wanted", "here", "built_for"),
    [
        ("tensorrt-rtx", "8.9", None, "8.9"),
        ("tensorrt-rtx", "8.9", "12.0", "8.9"),
        ("tensorrt-rtx", None, "12.0", "12.0"),
        ("tensorrt", None, "9.0", "9.0"),
        ("tensorrt", "9.0", "9.0", "9.0"),
    ],
)
def test_what_is_built_for(engine, wanted, here, built_for):
    assert place_for(engine, wanted, here).compute_capability == built_for


@pytest.mark.parametrize(
    ("engine", "wanted", "here", "words"),
    [
        ("tensorrt-rtx", None, None, "one of 8.9, 12.0"),
        ("tensorrt-rtx", None, "9.0", "for compute capability 9.0; tensorrt-rtx 1.7.1 knows 8.9"),
        ("tensorrt", None, None, "run dsbd-export --bundle on the machine with the GPU"),
        ("tensorrt", "12.0", "9.0", "builds only for the GPU of this machine, 9.0"),
    ],
)
def test_what_cannot_be_built_for(engine, wanted, here, words):
    with pytest.raises(ExportError) as error:
        place_for(engine, wanted, here)
    assert words in str(error.value)


def test_versions_are_compared_by_number():
    assert version_numbers("10.15.1rc2") == (10, 15, 1) and version_numbers("none") == ()
    assert version_numbers("10.9.0") < FLAVOURS["tensorrt"].oldest <= version_numbers("11.4.1")


def test_an_old_tensorrt_is_refused():
    old: Any = SimpleNamespace(__version__="10.9.0")
    with pytest.raises(ProviderError, match=r"tensorrt 10\.9\.0 is too old, at least 10\.15"):
        import_trt(FLAVOURS["tensorrt"], lambda _: old)


class FakeConfig:
    """Keeps the cache that it is given."""

    def create_timing_cache(self, data: bytes) -> SimpleNamespace:
        return SimpleNamespace(data=data, serialize=lambda: data + b"1")

    def set_timing_cache(self, cache: SimpleNamespace, ignore_mismatch: bool) -> None:
        self.cache = cache


def test_kernel_times_are_kept_by_version_and_gpu(tmp_path):
    fake: Any = FAKE_TRT
    place = BuildPlace(FLAVOURS["tensorrt"], fake, "9.0")
    file = timing_cache_file(place, {"XDG_CACHE_HOME": str(tmp_path)})
    assert file == tmp_path / "dsbd-ort" / "tensorrt-1.7.1-sm9.0.timing"
    for read in (b"", b"1", b"11"):
        config = FakeConfig()
        cache = load_timing_cache(config, file)
        assert config.cache is cache and cache.data == read
        save_timing_cache(cache, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
