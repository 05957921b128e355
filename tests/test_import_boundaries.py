"""Rules of the code base: modules that an import loads, one tree of errors, no code from data."""

import ast
import importlib
import pydoc
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dsbd_ort
from dsbd_errors import DsbdError
from dsbd_runtime.errors import InputError

ROOT = Path(__file__).parents[1]
OWN = ("dsbd_errors", "dsbd_forward", "dsbd_ort", "dsbd_export", "dsbd_runtime")
HEAVY = ("torch", "transformers", "optimum", "onnx", "onnxscript")


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import dsbd_ort, dsbd_runtime",
        "from dsbd_ort import Pipeline, DecodingConfig",
        "import dsbd_ort.cli",
        "import dsbd_runtime.loading",
    ],
)
def test_no_training_framework(statement):
    assert not loaded_by(statement) & set(HEAVY)


def test_the_package_is_light_until_a_name_is_used():
    loaded = loaded_by("import dsbd_ort; dir(dsbd_ort)")
    assert not loaded & {*HEAVY, "numpy", "onnxruntime", "tokenizers", "click"}


def test_the_public_names_are_shown():
    assert dir(dsbd_ort) == sorted(dsbd_ort.__all__)
    assert all(hasattr(dsbd_ort, name) for name in dir(dsbd_ort))
    page = pydoc.plain(pydoc.render_doc(dsbd_ort))
    for name in set(dir(dsbd_ort)) - {"__version__"}:
        assert name in page
    assert "from_bundle(path: " in page and "options: 'PipelineOptions'" in page


def test_constraints_need_numpy_alone():
    loaded = loaded_by("from dsbd_ort import JsonSchema, TokenTrie; JsonSchema({})")
    assert "numpy" in loaded
    assert not loaded & {*HEAVY, "llguidance", "onnxruntime", "tokenizers", "click", "dsbd_runtime"}


def test_no_server_without_dsbd_serve():
    loaded = loaded_by("import dsbd_ort, dsbd_ort.cli, dsbd_ort.engine")
    assert not loaded & {"fastapi", "starlette", "uvicorn", "prometheus_client"}


def test_no_ray_without_a_cluster():
    loaded = loaded_by("import dsbd_ort.cli, dsbd_ort.engine, dsbd_ort.cluster.replica")
    assert "ray" not in loaded


def test_the_algorithm_needs_numpy_alone():
    loaded = loaded_by("import dsbd_ort.decoding")
    assert "numpy" in loaded
    assert not loaded & {*HEAVY, "onnxruntime", "tokenizers", "click", "rich", "dsbd_runtime"}


def test_a_forward_needs_numpy_and_the_root_of_all_errors():
    modules = sorted(path.stem for path in (ROOT / "runtime" / "dsbd_forward").glob("[!_]*.py"))
    assert {"engine", "features", "forward", "logits"} <= set(modules)
    loaded = loaded_by("import " + ", ".join(f"dsbd_forward.{module}" for module in modules))
    of_others = loaded - loaded_by("pass") - sys.stdlib_module_names
    assert of_others == {"numpy", "dsbd_errors", "dsbd_forward"}


def test_engines_are_built_for_a_bundle_without_torch():
    loaded = loaded_by("import dsbd_export.tensorrt.tensorrt_build")
    assert "onnx" in loaded and not loaded & {"torch", "transformers", "optimum", "onnxruntime"}


def test_opening_a_manifest_needs_no_engine():
    assert "onnxruntime" not in loaded_by("import dsbd_runtime.bundle_files.bundle")


def test_generating_loads_no_training_framework(demo_bundle):
    statement = (
        "from dsbd_ort.cli import run\n"
        f"try: run([{str(demo_bundle)!r}, '--prompt', 'def f(', '--max-new-tokens', '4', "
        "'--stats'])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
    )
    loaded = loaded_by(statement)
    assert "onnxruntime" in loaded and not loaded & set(HEAVY)


PROGRAMS = [ROOT / "lab" / "run", *(ROOT / "lab").rglob("*.py")] + [
    path
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
]


@pytest.mark.parametrize("program", sorted(PROGRAMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_of_ours_is_there(program):
    """Some are run by hand only; no type checker reads scripts."""
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in {*OWN, "lab", "scripts"}:
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), name


PACKAGES = {
    "dsbd_ort": "dsbd_ort",
    "dsbd_runtime": "runtime/dsbd_runtime",
    "dsbd_export": "export/dsbd_export",
}


def error_classes():
    """Return every class of the packages whose name says that it is an error."""
    found = []
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                    module = importlib.import_module(".".join((package, *parts)))
                    found.append(getattr(module, node.name))
    return found


def test_every_error_is_a_dsbd_error():
    classes = error_classes()
    names = {error.__name__ for error in classes}
    assert {"BundleError", "ConfigError", "ExportError", "BenchmarkError", "BatchError"} <= names
    assert [error for error in classes if not issubclass(error, DsbdError)] == []
    assert dsbd_ort.DsbdError is DsbdError and issubclass(InputError, ValueError)


def test_the_root_of_the_errors_imports_nothing_of_ours():
    code = "import sys, dsbd_errors; print(*(n for n in sys.modules if n.startswith('dsbd_')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["dsbd_errors"]


SHIPPED = ("runtime/dsbd_errors", "dsbd_ort", "runtime/dsbd_runtime", "export/dsbd_export")
FORBIDDEN = re.compile(
    r"\b(pickle|cloudpickle|dill|joblib|marshal|shelve)\b|allow_pickle(?!=False)"
    r"|torch\.load\b(?!.*weights_only=True)"  # which runs nothing that a file names
    r"|np\.load\b(?!.*allow_pickle=False)"
    r"|register_custom_ops|(?<![\w.])(eval|exec)\("
)


def test_no_pickle_no_evaluated_text_and_no_custom_operators():
    files = [file for package in SHIPPED for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert found == []
