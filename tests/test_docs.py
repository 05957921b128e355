"""Documentation: every command and program runs, named files, links and cited sections exist."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig

from dsbd_export import draft_export, pipeline
from dsbd_export.checkpoints.families import FAMILIES
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.doc_blocks import DOCUMENTS, ROOT, Block, ExportsOnce, blocks_of, run_block
from tests.runtime.bundle_edits import with_files, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle
from tests.test_language_model import ARPA

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
BLOCKS = [block for file in DOCUMENTS for block in blocks_of(file, file.read_text())]
_NAMED = re.compile(  # a source file, with folders or without, or a path below one of our folders
    r"(?<![\w/.:*{<-])("
    r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|h|hpp|cpp|js|mjs|toml|yml)(?![\w*/])"
    r"|(?:dsbd_ort|export|runtime|tests|scripts|lab|docs|examples)/[\w./-]*[\w/]"
    r")"
)
_HELD = re.compile(r"`(\w+)` (?:in|of)\s+`([\w/]+\.py)`")
NOT_OURS = {"include/onnxruntime_cxx_api.h", "llama.cpp"}
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """TARGET and DRAFT, and OTHER with another vocabulary: the pair that a reader would have."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    write_checkpoint(folder / "TARGET", config)
    shutil.copytree(folder / "TARGET", folder / "DRAFT")
    shutil.copytree(folder / "TARGET", folder / "OTHER")
    tokenizer = json.loads((folder / "OTHER" / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (folder / "OTHER" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    return ExportsOnce(tmp_path_factory.mktemp("exports"))


@pytest.fixture
def shared_captures(captures, monkeypatch):
    """TARGET and DRAFT are captured once for all commands, which import what exports them."""
    for module, name in ((pipeline, "export_bundle"), (draft_export, "export_draft")):
        export = partial(getattr(module, name), source_of=captures)
        monkeypatch.setattr(module, name, export)


@pytest.fixture
def workspace(tmp_path, tiny_bundle, checkpoints):
    """The folder that the documents use, with tiny models under their names."""
    for name in ("bundle", "BUNDLE", "draftless_bundle", "damaged_bundle", "build/twin_bundle"):
        shutil.copytree(tiny_bundle.path, tmp_path / name)
    for name in ("TARGET", "DRAFT", "OTHER"):
        (tmp_path / name).symlink_to(checkpoints / name)
    (tmp_path / "build" / "twin_150m").mkdir()
    (tmp_path / "build" / "twin_150m" / "target").symlink_to(checkpoints / "TARGET")
    (tmp_path / "build" / "twin_150m" / "draft").symlink_to(checkpoints / "DRAFT")
    chat = {"chat_template.jinja": CHAT_TEMPLATE}
    with_files(tiny_bundle.path, tmp_path / "chat_bundle", chat)
    without_draft(tmp_path / "draftless_bundle", TinyModel())
    topk = TinyModel(logits="topk:8", full_logits=False)
    write_tiny_bundle(tmp_path / "topk_bundle", target=topk, draft=topk)
    with (tmp_path / "damaged_bundle" / "target" / "model.onnx").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "prompt.txt").write_text("def read(path):")
    (tmp_path / "domain.arpa").write_text(ARPA)
    (tmp_path / "long.txt").write_text("x" * 2100)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.py").write_text(f"def f{number}(x): return x\n" * 40)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def read("}\n{"prompt": "import "}\n')
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "prompt.txt"], cwd=tmp_path, check=True)
    (tmp_path / "prompt.txt").write_text("def write(path):")
    return tmp_path


def _case(block):
    starts_ray_serve = (block.server or "").startswith("serve run")  # a minute, mostly to end it
    return pytest.param(block, id=block.place, marks=[pytest.mark.slow] * starts_ray_serve)


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("block", [_case(block) for block in BLOCKS])
def test_block_does_what_it_says(block, workspace, exports):
    if block.skip_reason:
        pytest.skip(block.skip_reason)
    run_block(block, workspace, exports)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "dsbd-run bundle/ --no-such-option\n"),
        ("sh", "dsbd-run bundle/ --prompt x | no-such-program\n"),
        ("sh", "scripts/no_such_script\n"),
        ("sh", "pip install '.[no-such-extra]'\n"),
        ("console", "$ dsbd-run nowhere/ --prompt x\nError: another message\n"),
        ("console", "$ dsbd-run bundle/ --prompt x --max-new-tokens 1\nError: ...\n"),
        ("python", "assert 1 == 2\n"),
    ],
)
def test_a_block_that_has_rotted_is_found(language, text, workspace, exports):
    with pytest.raises(AssertionError):
        run_block(Block("here", language, text, None), workspace, exports)


def test_a_marker_holds_for_the_next_block_alone():
    text = "<!-- test: skip, needs a GPU -->\n```sh\na\n```\n\n```python\nb\n```\n```text\nc\n```\n"
    first, second = blocks_of(ROOT / "README.md", text)
    assert first == replace(first, language="sh", text="a\n", skip_reason="needs a GPU")
    assert second == Block("README.md:6", "python", "b\n", None)


def test_a_server_that_is_not_there_is_found(workspace, exports):
    text = "<!-- test: with dsbd-serve bundle/ -->\n```sh\ncurl -sf http://127.0.0.1:8000/no\n```\n"
    (block,) = blocks_of(ROOT / "README.md", text)
    assert block.server == "dsbd-serve bundle/"
    for wrong in (block, replace(block, server="dsbd-serve nowhere/")):
        with pytest.raises(AssertionError):
            run_block(wrong, workspace, exports)


@pytest.fixture(scope="session")
def repository():
    """Every file and folder, from the root, with a slash before it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [file for file in map(Path, done.stdout.splitlines()) if (ROOT / file).exists()]
    return {f"/{path}" for file in files for path in (file, *file.parents)}


def missing_files(text, repository):
    """Return the files that a text names and that exist nowhere, except those that it writes."""
    matches = _NAMED.finditer(text)
    named = {match[1].rstrip("/").removeprefix("../").removeprefix("../") for match in matches}
    written = set(re.findall(r"^cat > (\S+) <<", text, re.MULTILINE))
    examples = {name for name in named if "NAME" in name}
    return {
        name
        for name in named - written - examples - NOT_OURS
        if not any(path.endswith(f"/{name}") for path in repository)
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_named_files_exist_and_hold_what_is_said(document, repository):
    if document.name == "changes.md":
        pytest.skip("a log: its files may be gone")
    text = document.read_text()
    assert missing_files(text, repository) == set()
    for name, file in _HELD.findall(text):
        if (ROOT / file).exists():
            defined = rf"^(?:class |def )?{name}\b"
            assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), f"{file}: no {name}"


def test_a_file_that_does_not_exist_is_found(repository):
    text = "`trt_session.py`, `scripts/measure_calls`, lab/no.md; lab/run, `decode.py`, `lab/`"
    assert missing_files(text, repository) == {
        "trt_session.py",
        "scripts/measure_calls",
        "lab/no.md",
    }


def test_the_number_of_families_is_that_of_the_table():
    count = sum(row.refusal is None for row in FAMILIES.values())
    assert f"[{count} families]" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_links_lead_somewhere(document):
    for name, anchor in _LINK.findall(document.read_text()):
        file = document.parent / name if name else document
        assert file.exists(), f"{document.name} links to {name}"
        if anchor:
            assert anchor in _anchors(file), f"{document.name} links to {name}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_a_paragraph_ends_before_a_table(document):
    """Else the site shows the table as lines of text, although GitHub does not."""
    lines = document.read_text().splitlines()
    for before, head, rule in zip(lines, lines[1:], lines[2:], strict=False):
        if re.fullmatch(r"\|[-:| ]+\|", rule) and head.startswith("|"):
            assert not before or before.startswith(("#", "<!--", "![")), f"{document.name}: {head}"


def _anchors(file):
    """Return the names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


CITED = re.compile(r"(docs/[a-z_/]+\.md)(?: ((?:\d+(?:\.\d+)*(?:, )?)+))?")


def sources():
    folders = ("dsbd_ort", "export", "runtime", "scripts", "lab", "tests", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    kinds = (".py", ".hpp", ".cpp", ".h", ".js", "")
    return [f for f in files if f.is_file() and f.suffix in kinds]


def test_cited_documents_and_sections_exist():
    num_cited = 0
    for file in sources():
        for document, numbers in CITED.findall(file.read_text(encoding="utf-8", errors="ignore")):
            path = ROOT / document
            assert path.is_file(), f"{file.relative_to(ROOT)} cites {document}"
            headings = re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", path.read_text(), re.MULTILINE)
            for number in filter(None, numbers.split(", ")):
                assert number in headings, f"{file.relative_to(ROOT)} cites {document} {number}"
                num_cited += 1
    assert num_cited >= 10
