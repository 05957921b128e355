"""The command dsbd_native: what it prints and refuses, and what the installed package offers."""

import json
import os
import shutil
import subprocess

import pytest

from dsbd_ort import Pipeline, TokenTrie
from dsbd_ort.decoding.errors import ConstraintError
from tests.doc_blocks import blocks_of
from tests.lab.lab_run import lab_run
from tests.native.conftest import ROOT, cached, run_or_fail
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

IDS = [100, 101, 102]


def run(native_build, *arguments, **options):
    command = [native_build / "dsbd_native", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def with_options(**options):
    """Return options as a command line."""
    pairs = [(f"--{name.replace('_', '-')}", json.dumps(value)) for name, value in options.items()]
    return [word for pair in pairs for word in pair]


def test_documented_commands(native_build, tiny_bundle, tiny_pipe, tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "native").symlink_to(native_build)
    (tmp_path / "bundle").symlink_to(tiny_bundle.path)
    lines = [{"ids": IDS}, {"ids": [4], "seed": 5}, {"ids": [999]}, {"ids": [4], "future": 1}]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    document = ROOT / "docs" / "embedding.md"
    (block,) = (
        block
        for block in blocks_of(document, document.read_text())
        if "test_native_command" in (block.skip_reason or "")
    )
    done = subprocess.run(
        ["bash", "-e", "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ids, answer, *answers = done.stdout.splitlines()
    assert 1 <= len(ids.split(",")) <= 8
    greedy = tiny_pipe.generate(IDS, strategy="greedy", max_new_tokens=8)
    assert json.loads(answer)["sequences"][0]["token_ids"] == greedy.sequences[0].token_ids
    first, second, *errors = map(json.loads, answers)
    for found, line in ((first, {"seed": 7}), (second, {"seed": 5})):
        given = IDS if found is first else [4]
        expected = tiny_pipe.generate(given, top_k=20, **line)
        assert found["sequences"][0]["token_ids"] == expected.sequences[0].token_ids
    assert "token id 999; expected 0 to 257" in errors[0]["error"]
    assert "unknown option 'future'" in errors[1]["error"]


def test_statistics_and_settings(native_build, tiny_bundle):
    options = with_options(max_new_tokens=4, strategy="greedy")
    done = run(native_build, tiny_bundle.path, "--ids", "1", "--stats", "--threads", "1", *options)
    assert (done.returncode, len(done.stdout.split(","))) == (0, 4)
    assert json.loads(done.stderr)["target_calls"] > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ids", "258"], "token id 258; expected 0 to 257"),
        (["--ids", "1x"], "--ids is '1x'; expected 1,2,3"),
        (["--ids", "1", "--max-new-tokens", "2049"], "use max_new_tokens 2047 or less"),
        (["--ids", "1", "--draft-beams", "2"], "draft_beams has a layer of 2"),
        (["--ids", "1", "--strategy", "mjss"], "strategy is 'mjss'"),
        (["--ids", "1", "--num-beams"], "--num-beams has no value"),
        (["--ids", "1", "--input", "x"], "expected a bundle, and one of --prompt, --ids"),
        (["--input", "no.jsonl"], "cannot read no.jsonl"),
        (["--ids", "1", "--settings", '{"provider": "cuda"}'], 'provider "cuda", which the native'),
        (["--ids", "1", "--settings", "{"], "a value is no JSON"),
        (["--ids", "1", "--constraint", '{"regex": "a"}'], "constraint"),
    ],
)
def test_what_cannot_be_done_is_refused(native_build, tiny_bundle, arguments, words):
    done = run(native_build, tiny_bundle.path, *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_bundle_without_a_draft(native_build, tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    options = with_options(strategy="beam-sample", num_beams=2, top_k=4, seed=3, max_new_tokens=9)
    wanted = run(native_build, tmp_path / "bundle", "--ids", "1,2,3", *options)
    without_draft(tmp_path / "bundle", TinyModel())
    found = run(native_build, tmp_path / "bundle", "--ids", "1,2,3", *options)
    assert found.returncode == 0 and found.stdout == wanted.stdout
    refused = run(native_build, tmp_path / "bundle", "--ids", "1", "--strategy", "mjsd")
    assert refused.returncode == 2 and "the bundle has no draft" in refused.stderr


def test_a_trie(native_build, tiny_bundle, tiny_pipe, tmp_path):
    sequences = [[5, 6, 7], [5, 6], [5, 9, 200, 31], [44]]
    TokenTrie.from_sequences(sequences).save(tmp_path / "items.trie")
    options = {"num_beams": 3, "num_return_sequences": 3, "seed": 2}
    constraint = {"trie": str(tmp_path / "items.trie")}
    done = run(
        native_build, tiny_bundle.path, "--ids", "1", "--json",
        *with_options(constraint=constraint, **options),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = tiny_pipe.generate([1], constraint=constraint, **options).sequences
    found = json.loads(done.stdout)["sequences"]
    assert [each["token_ids"] for each in found] == [each.token_ids for each in expected]
    for eos, where in [(5, "within a sequence"), (7, "after a sequence of its own")]:
        ends = with_options(constraint=constraint, eos_token_id=eos)
        refused = run(native_build, tiny_bundle.path, "--ids", "1", *ends)
        assert refused.returncode == 2 and f"token {eos} {where}" in refused.stderr
        with pytest.raises(ConstraintError, match=f"token {eos} {where}"):
            tiny_pipe.generate([1], constraint=constraint, eos_token_id=eos)


@pytest.fixture(scope="module")
def installed(native_build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run_or_fail("cmake", "--install", native_build, "--strip", "--prefix", folder)
    return folder


def test_the_installed_package_and_the_examples(installed, native_build, tiny_bundle, tmp_path):
    """Built by find_package; the library is small and shows its functions alone."""
    (library,) = {file.resolve() for file in installed.rglob("libdsbd_native.so*")}
    has_chats = not cached(native_build, "minja_INCLUDE").endswith("NOTFOUND")
    assert library.stat().st_size <= (2.2e6 if has_chats else 2.0e6)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True
    )
    names = {line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines()}
    assert {name for name in names if not name.startswith("_Z")} == {
        f"dsbd_{name}"
        for name in "open generate stats close free last_error version set_text".split()
    }
    prefixes = f"-DCMAKE_PREFIX_PATH={installed};{cached(native_build, 'CMAKE_PREFIX_PATH')}"
    run_or_fail("cmake", "-S", ROOT / "examples" / "native", "-B", tmp_path / "examples", prefixes)
    run_or_fail("cmake", "--build", tmp_path / "examples")
    service = tmp_path / "examples" / "service"
    lines = [
        {"ids": [1, 2, number % 50], "max_new_tokens": 2, "seed": number} for number in range(40)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    done = subprocess.run(
        [service, tiny_bundle.path, "8"], input=text, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        for line, answer in zip(lines[:8], done.stdout.splitlines(), strict=False):
            expected = pipeline.generate(line.pop("ids"), **line).sequences[0].token_ids
            assert json.loads(answer)["sequences"][0]["token_ids"] == expected
    assert len(done.stdout.splitlines()) == len(lines)


def test_pkg_config_compiles_the_example_in_c(installed, tiny_bundle, tiny_pipe, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    (folder,) = (file.parent for file in installed.rglob("dsbd_native.pc"))
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder)}
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "dsbd_native"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    program = tmp_path / "continue"
    source = ROOT / "examples" / "native" / "continue.c"
    rpath = f"-Wl,-rpath,{folder.parent}"
    run_or_fail(
        "cc", "-std=c99", "-Wall", "-Wextra", "-Werror", source, "-o", program, *flags, rpath
    )
    options = {"max_new_tokens": 6, "seed": 4, "num_beams": 2}
    done = subprocess.run(
        [program, tiny_bundle.path, json.dumps(options), "1", "2"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    streamed, result = done.stdout.splitlines()
    expected = tiny_pipe.generate([1, 2], **options).sequences[0].token_ids
    assert json.loads(result)["sequences"][0]["token_ids"] == expected
    assert list(map(int, streamed.split(","))) == expected


def test_the_measurement_of_its_host_time(native_build, tiny_bundle, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- native -->\n<!-- end of native -->\n")
    options = ["--document", page, "--rounds", 1, "--wait", 0, "--threads", 1]
    done = lab_run("native-host", tiny_bundle.path, native_build / "dsbd_native", *options)
    assert "resident, MB" in page.read_text(), done
