"""The command dsbd_native: what it prints and refuses, and what the installed package offers."""

import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from dsbd_ort import Pipeline, TokenTrie
from dsbd_ort.cli import run as dsbd_run
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.version import __version__
from tests.commands.calls import called
from tests.doc_blocks import blocks_of
from tests.lab.lab_run import lab_run
from tests.native.conftest import ROOT, cached, run_or_fail
from tests.native.text_command import with_checks
from tests.runtime.bundle_edits import with_files, without_draft
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
    lines = [{"ids": IDS}, {"ids": [4], "seed": 5}, {"ids": IDS}, {"ids": [999]}]
    lines += [{"ids": [4], "future": 1}, {"ids": [4], "prompt": "a"}]
    (tmp_path / "requests.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
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
    found = [json.loads(line) for line in answers]
    batch = ["--input", tmp_path / "requests.jsonl", "--output", "-", "--top-k", 20, "--seed", 7]
    wanted = [
        json.loads(line) for line in called(dsbd_run, tiny_bundle.path, *batch).stdout.splitlines()
    ]
    for ours, theirs in zip(found[:3], wanted, strict=False):
        assert ours["seed"] == theirs["seed"]
        assert ours["sequences"][0]["token_ids"] == theirs["sequences"][0]["token_ids"]
    assert wanted[0]["seed"] != wanted[2]["seed"]
    assert "token id 999; expected 0 to 257" in found[3]["error"]
    assert "unknown option 'future'" in found[4]["error"]
    assert "exactly one of prompt, prompt_ids" in found[5]["error"]
    one = called(dsbd_run, tiny_bundle.path, "--ids", "100,101,102", "--num-beams", 2, "--seed", 1)
    native = run(
        native_build, tiny_bundle.path, "--ids", "100,101,102", *with_options(num_beams=2, seed=1)
    )
    assert one.stdout == native.stdout


def test_statistics_and_settings(native_build, tiny_bundle):
    options = with_options(max_new_tokens=4, strategy="greedy")
    done = run(native_build, tiny_bundle.path, "--ids", "1", "--stats", "--threads", "1", *options)
    assert (done.returncode, len(done.stdout.split(","))) == (0, 4)
    assert json.loads(done.stderr)["target_calls"] > 1


def test_a_byte_order_mark_is_no_text(native_build, tiny_bundle, tmp_path):
    file, answers = tmp_path / "in.jsonl", []
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(json.dumps({"ids": IDS}), encoding=encoding)
        done = run(native_build, tiny_bundle.path, "--input", file, "--strategy", "greedy")
        answers.append(json.loads(done.stdout)["sequences"])
    assert answers[0] == answers[1]
    for encoding in ("utf-16", "utf-16-be"):
        file.write_text(json.dumps({"ids": IDS}), encoding=encoding)
        done = run(native_build, tiny_bundle.path, "--input", file)
        assert done.returncode == 2 and "is UTF-16" in done.stderr


def test_fields_of_the_model_that_have_no_effect_are_named(native_build, tiny_bundle, tmp_path):
    file = {"generation_config.json": json.dumps({"guidance_scale": 1.5, "max_new_tokens": 3})}
    bundle = with_files(tiny_bundle.path, tmp_path / "bundle", file)
    for settings, told in (("{}", '"guidance_scale":1.5'), ('{"generation_config": false}', "")):
        done = run(native_build, bundle, "--ids", "1", "--settings", settings)
        assert done.returncode == 0 and (told in done.stderr) and bool(done.stderr) == bool(told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ids", "258"], "token id 258; expected 0 to 257"),
        (["--ids", "1x"], "--ids is '1x'; expected 1,2,3"),
        (["--ids", "1", "--max-new-tokens", "2049"], "use max_new_tokens 2047 or less"),
        (["--ids", "1", "--draft-beams", "2"], "draft_beams has a layer of 2"),
        (["--ids", "1", "--strategy", "mjss"], "strategy is 'mjss'"),
        (["--ids", "1", "--num-beams"], "--num-beams has no value"),
        (["--ids", "1", "--chat"], "--chat needs --prompt"),
        (["--prompt", "1", "--system", "a"], "--system needs --chat"),
        (["--ids", "1", "--input", "x"], "expected a bundle, and one of --prompt, --ids"),
        (["--input", "no.jsonl"], "cannot read no.jsonl"),
        (
            ["--ids", "1", "--provider", "tensorrt"],
            'is "tensorrt", which the native library does not',
        ),
        (["--ids", "1", "--provider", "webgpu"], "has the form portable, provider 'webgpu' runs"),
        (["--ids", "1", "--provider", "cuda"], "needs the library libonnxruntime_providers_cuda"),
        (["--ids", "1", "--provider", "cuda:x"], 'names the device "x", expected a number'),
        (["--ids", "1", "--provider", "cpu:0"], 'cpu has no numbered devices; write "cpu"'),
        (
            ["--ids", "1", "--settings", '{"cuda_graphs": true}'],
            "records no calls of provider 'cpu'",
        ),
        (["--ids", "1", "--settings", "{"], "a value is no JSON"),
        (["--ids", "1", "--constraint", '{"regex": "a"}'], "constraint"),
    ],
)
def test_what_cannot_be_done_is_refused(native_build, tiny_bundle, arguments, words):
    done = run(native_build, tiny_bundle.path, *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_prepared_engines(native_build, tiny_bundle, tmp_path):
    """The same tokens; made once, made again if damaged, left out if there is no place for them."""
    cache = tmp_path / "not" / "yet"
    words = ["--ids", "1,2", "--json", *with_options(max_new_tokens=6, seed=1, num_beams=2)]

    def answered(folder):
        given = json.dumps({"engine_cache": str(folder)})
        done = run(native_build, tiny_bundle.path, *words, "--settings", given)
        tokens = done.stdout and json.loads(done.stdout)["sequences"][0]["token_ids"]
        return tokens, done.stderr

    def written():
        return {file: file.stat().st_mtime_ns for file in cache.glob("*/*")}

    plain = json.loads(run(native_build, tiny_bundle.path, *words).stdout)["sequences"][0]
    assert answered(cache) == (plain["token_ids"], "")
    before = written()
    assert (
        sorted(file.name for file in before)
        == 2 * ["model.bin"] + 2 * ["model.onnx"] + 2 * ["whole.json"]
        and len(list(cache.iterdir())) == 2
    )
    assert answered(cache) == (plain["token_ids"], "") and written() == before
    for part in ("model.bin", "whole.json", "model.onnx"):
        damaged = next(file for file in before if file.name == part)
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-9] + b"x" + content[-8:])
        assert answered(cache) == (plain["token_ids"], "")
        assert damaged.read_bytes() == content or part == "whole.json"
        assert written() != before and len(written()) == 6
    (tmp_path / "file").touch()
    tokens, said = answered(tmp_path / "file")
    assert "engine_cache is" in said and "which is a file; expected a folder" in said
    tokens, said = answered("/proc/cache")
    assert tokens == plain["token_ids"] and said.count("cannot keep a prepared engine of") == 2


def test_a_bundle_without_a_draft(native_build, tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    options = with_options(strategy="beam-sample", num_beams=2, top_k=4, seed=3, max_new_tokens=9)
    wanted = run(native_build, tmp_path / "bundle", "--ids", "1,2,3", *options)
    without_draft(tmp_path / "bundle", TinyModel())
    found = run(native_build, tmp_path / "bundle", "--ids", "1,2,3", *options)
    assert found.returncode == 0 and found.stdout == wanted.stdout
    refused = run(native_build, tmp_path / "bundle", "--ids", "1", "--strategy", "mjsd")
    assert refused.returncode == 2 and "the bundle has no draft" in refused.stderr


@pytest.mark.parametrize("beams", [1, 2, 4])
def test_a_draft_with_a_shorter_context(native_build, tmp_path, beams):
    bundle = write_tiny_bundle(tmp_path / "bundle", draft=TinyModel(seed=1, context_length=48))
    names = ("draft_rows", "draft_calls", "num_draft_tokens", "num_accepted_tokens")
    with Pipeline.from_bundle(bundle, num_threads=1, prefix_cache=False) as pipe:
        for context, begin in (("all", []), ("auto", [256]), (12, [256])):
            prompt = [*begin, *range(100)]
            options = {"num_beams": beams, "draft_policy": "fixed", "max_new_tokens": 60, "seed": 3}
            expected = pipe.generate(prompt, **options, draft_context=context)
            words = [*with_options(**options), "--draft-context", context, "--json"]
            done = run(native_build, bundle, "--ids", ",".join(map(str, prompt)), *map(str, words))
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            assert answer["sequences"][0]["token_ids"] == expected.sequences[0].token_ids
            stats = {name: getattr(expected.stats, name) for name in names}
            assert {name: answer["stats"][name] for name in names} == stats
            assert stats["draft_calls"] > 60 and stats["draft_rows"] > 100


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


SEAL_BYTES = 132  # of a trie's file


def sealed(content: bytes) -> bytes:
    """Return a trie's file whose checksum is right again."""
    crc = zlib.crc32(content[:-SEAL_BYTES])
    return content[:-4] + crc.to_bytes(4, "little")


def test_damaged_tries_are_refused(native_build, tiny_bundle, tmp_path):
    file = tmp_path / "items.trie"

    def refusal_of(content: bytes) -> str:
        file.write_bytes(content)
        options = with_options(constraint={"trie": str(file)})
        done = run(native_build, tiny_bundle.path, "--ids", "1", *options)
        assert done.returncode == 2
        return done.stderr

    TokenTrie.from_sequences([[1, 2], [1, 3], [4]]).save(file)
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [good[:size] for size in (0, 5, 130, 140, 300, len(good) - 1)]
    for place in rng.integers(len(good), size=15):
        changed = bytearray(good)
        changed[place] ^= int(rng.integers(1, 256))
        damaged.append(bytes(changed))
    for content in damaged:
        assert "save it again" in refusal_of(content)
    version = good.replace(b"\x02\0\0\0\0\0\0\0", b"\x03\0\0\0\0\0\0\0", 1)
    assert "begins with" in refusal_of(version)
    offsets = sealed(good.replace(b"\x04\0\0\0", b"\x09\0\0\0"))
    assert "do not form a trie" in refusal_of(offsets)


@pytest.fixture(scope="module")
def installed(native_build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run_or_fail("cmake", "--install", native_build, "--strip", "--prefix", folder)
    return folder


def test_the_installed_package(installed, native_build, tmp_path):
    """The library is small, shows its functions alone, and runs wherever the folder is."""
    (library,) = {file.resolve() for file in installed.rglob("libdsbd_native.so*")}
    has_chats = not cached(native_build, "minja_INCLUDE").endswith("NOTFOUND")
    assert library.stat().st_size <= (2.3e6 if has_chats else 2.1e6)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True
    )
    names = {line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines()}
    assert {name for name in names if not name.startswith("_Z")} == {
        f"dsbd_{name}"
        for name in "open generate stats close free last_error version set_text".split()
    }
    moved = shutil.copytree(installed, tmp_path / "moved", symlinks=True)
    (library,) = {file.resolve() for file in moved.rglob("libdsbd_native.so*")}
    assert (library.parent / "libonnxruntime.so.1").is_file()
    for file in (library, moved / "bin" / "dsbd_native"):
        dynamic = subprocess.run(["readelf", "-d", file], capture_output=True, text=True).stdout
        (runpath,) = re.findall(r"\[(\S*ORIGIN\S*)\]|R(?:UN)?PATH.*\[(.*)\]", dynamic)
        assert all(part.startswith("$ORIGIN") for part in "".join(runpath).split(":")), runpath
    for name in ("dsbd_native", "dsbd_native_text"):
        done = subprocess.run([moved / "bin" / name], capture_output=True, text=True)
        assert done.returncode == 2 and "usage" in done.stderr, done.stderr


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_bundle(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "bundle"
    return with_checks(tiny_bundle.path, folder, text_by_name={"chat_template.jinja": CHAT})


@pytest.fixture(scope="module")
def chat_pipe(chat_bundle):
    with Pipeline.from_bundle(chat_bundle, num_threads=1, chat_defaults=True) as opened:
        yield opened


def built_example(installed, folder, name):
    """Build an example in a folder by the lines in its head; return the program."""
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    source = ROOT / "examples" / "native" / name
    (folder / name).symlink_to(source)
    head = re.findall(r"^(?: \*|//) {5}(\S.*)$", source.read_text(), re.MULTILINE)
    (place,) = (file.parent for file in installed.rglob("dsbd_native.pc"))
    script = "\n".join(head[:3]).replace("DIR/lib/pkgconfig", str(place))
    strict = script.replace(
        "cc continue.c", "cc -std=c99 -Wall -Wextra -Werror -pedantic continue.c"
    )
    run_or_fail("bash", "-e", "-c", f"cd {folder}\n{strict}")
    assert head[3:], "a line that runs it"
    return folder / source.stem


FEW = {"max_new_tokens": 6, "seed": 4, "num_beams": 2, "draft_policy": "fixed"}


def test_an_example_streams_text(installed, chat_bundle, tiny_pipe, tmp_path):
    program = built_example(installed, tmp_path, "continue.c")
    command = [program, chat_bundle, "read(", json.dumps(FEW)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    streamed, _, result = done.stdout.decode().rstrip("\n").rpartition("\n")
    expected = tiny_pipe.generate("read(", **FEW).sequences[0]
    assert streamed == expected.text
    assert json.loads(result)["sequences"][0]["token_ids"] == expected.token_ids


def test_an_example_holds_a_conversation(installed, native_build, chat_bundle, chat_pipe, tmp_path):
    if cached(native_build, "minja_INCLUDE").endswith("NOTFOUND"):
        pytest.skip("this build has no chats")
    program = built_example(installed, tmp_path, "chat.cpp")
    command = [program, chat_bundle, json.dumps(FEW)]
    done = subprocess.run(command, input=b'say "a\\b"\nand now\n', capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    messages, shown = [], ""
    for line in ('say "a\\b"', "and now"):
        messages.append({"role": "user", "content": line})
        answer = chat_pipe.generate(messages, **FEW).sequences[0].text
        messages.append({"role": "assistant", "content": answer})
        shown += f"{answer}\n"
    assert done.stdout.decode() == shown


@pytest.mark.parametrize("by_cmake", [True, False])
def test_an_example_serves_threads(
    installed, native_build, chat_bundle, tiny_pipe, tmp_path, by_cmake
):
    if by_cmake:
        options = [f"-DCMAKE_PREFIX_PATH={installed}"]
        run_or_fail("cmake", "-S", ROOT / "examples" / "native", "-B", tmp_path, *options)
        run_or_fail("cmake", "--build", tmp_path)
        program = tmp_path / "service"
    else:
        program = built_example(installed, tmp_path, "service.cpp")
    prompts = [f"a{number % 5}(" for number in range(40)]
    done = subprocess.run(
        [program, chat_bundle, "8", json.dumps(FEW)],
        input="".join(f"{prompt}\n" for prompt in prompts),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = [tiny_pipe.generate(prompt, **FEW).sequences[0].token_ids for prompt in prompts[:5]]
    answers = [json.loads(line)["sequences"][0]["token_ids"] for line in done.stdout.splitlines()]
    assert answers == wanted * 8


def test_help_version_and_chats(native_build, chat_bundle, chat_pipe):
    for option, words in (("--help", "usage: dsbd_native BUNDLE"), ("--version", __version__)):
        done = run(native_build, option)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(words)
    if cached(native_build, "minja_INCLUDE").endswith("NOTFOUND"):
        pytest.skip("this build has no chats")
    words = ["--chat", "--system", "be brief", "--prompt", "5", *with_options(**FEW)]
    done = run(native_build, chat_bundle, *words)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "5"}]
    expected = chat_pipe.generate(messages, **FEW).sequences[0]
    assert (done.returncode, done.stdout) == (0, f"{expected.text}\n"), done.stderr
    seeded = ["--chat", "--prompt", "a", "--seed", "3", "--max-new-tokens", "9", "--json"]
    answer = json.loads(run(native_build, chat_bundle, *seeded).stdout)  # with defaults of chats
    wanted = chat_pipe.generate([{"role": "user", "content": "a"}], seed=3, max_new_tokens=9)
    assert answer["sequences"][0]["token_ids"] == wanted.sequences[0].token_ids


def test_values_are_lists_and_texts(native_build, chat_bundle, tiny_pipe):
    given = {"strategy": "tree-speculative", "draft_length": 3, "draft_policy": "fixed", "seed": 1}
    words = [*with_options(**given), "--draft-beams", "3,2,1", "--stop-strings", "1,2"]
    words += ["--eos-token-id", "7,8", "--predicted-text", "5", "--drafter", "ngram", "--json"]
    done = run(native_build, chat_bundle, "--prompt", "a", *words)
    assert done.returncode == 0, done.stderr
    expected = tiny_pipe.generate(
        "a", draft_beams=[3, 2, 1], stop_strings=["1,2"], eos_token_id=[7, 8], predicted_text="5",
        drafter="ngram", **given,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["sequences"][0]["token_ids"] == expected.sequences[0].token_ids
    assert answer["stats"]["num_draft_tokens"] == expected.stats.num_draft_tokens


def test_the_measurement_of_its_host_time(native_build, tiny_bundle, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- native -->\n<!-- end of native -->\n")
    options = ["--document", page, "--rounds", 1, "--wait", 0, "--threads", 1]
    done = lab_run("native-host", tiny_bundle.path, native_build / "dsbd_native", *options)
    assert "resident, MB" in page.read_text(), done
