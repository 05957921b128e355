"""Picture readers on the command line and over HTTP, and prompts that are refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import draft_kind
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_target
from dsbd_export.pipeline import export_bundle
from dsbd_ort import Pipeline
from dsbd_runtime.errors import BundleError, InputError
from scripts.picture_reader_checkpoint import write_picture_reader
from tests.commands.test_run import assert_one_line_error, dsbd_run
from tests.given.pictures import data_url, png
from tests.openai_server.running_server import MODEL, client_of, refused
from tests.picture_readers.pages import message, page
from tests.runtime.bundle_edits import edited


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    names = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, name in enumerate(names):
        page(seed).save(name)
    return names


def text_of(pipe: Pipeline, *prompt: Any) -> str:
    return pipe.generate(message(*prompt)).sequences[0].text


def test_files_of_the_command(trocr: Pipeline, trocr_folder: Path, files: list[Path]) -> None:
    wanted = [text_of(trocr, file) for file in files]
    bundle = trocr_folder / "bundle"
    one = dsbd_run(bundle, "--image", files[0], "--threads", 1)
    assert one.exit_code == 0 and one.stdout == f"{wanted[0]}\n"
    every = dsbd_run(bundle, "--image", *files, "--threads", 1)
    lines = [f"{file}:\n{text}\n" for file, text in zip(files, wanted, strict=True)]
    assert every.stdout == "".join(lines)
    found = dsbd_run(bundle, "--image", files[0], "--image", files[1], "--json", "--threads", 1)
    objects = [json.loads(line) for line in found.stdout.splitlines()]
    assert [each["image"] for each in objects] == [str(file) for file in files[:2]]
    assert [each["sequences"][0]["text"] for each in objects] == wanted[:2]


def test_drawn_answers_have_seeds_and_one_has_a_trace(
    trocr_folder: Path, files: list[Path], tmp_path: Path
) -> None:
    bundle, trace = trocr_folder / "bundle", tmp_path / "trace.json"
    drawn = dsbd_run(bundle, "--image", *files[:2], "--strategy", "sample", "--threads", 1)
    seeds = re.findall(r"^seed (\d+)", drawn.stderr, re.MULTILINE)
    assert len(seeds) == 2
    given = "--strategy", "sample", "--seed", seeds[1], "--trace", trace, "--threads", 1
    again = dsbd_run(bundle, "--image", files[1], *given)
    assert drawn.stdout.endswith(f"{files[1]}:\n{again.stdout}") and json.loads(trace.read_text())
    refused = dsbd_run(bundle, "--image", *files[:2], *given)
    assert_one_line_error(refused, "draws one request; give one --image")


def test_a_task_on_the_command_line(donut: Pipeline, donut_folder: Path, files: list[Path]) -> None:
    found = dsbd_run(
        donut_folder / "bundle", "--image", files[0], "--prompt", "def read", "--threads", 1
    )
    assert found.stdout == f"{text_of(donut, files[0], 'def read')}\n"


def test_refusals_of_the_command(trocr_folder: Path, files: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(png(page())[:200])
    bundle = trocr_folder / "bundle"
    for arguments, words in (
        (("--image", bad), "damaged"),
        (("--image", tmp_path / "none.png"), "cannot be read"),
        (("--image", files[0], bad), "bad.png is damaged"),
        (("--prompt", "hello"), "reads pictures, a str is given as its prompt"),
    ):
        result = dsbd_run(bundle, *arguments, "--threads", 1)
        assert_one_line_error(result, words)


def test_a_chat_completion_has_one_picture_and_a_task(trocr_folder: Path, trocr: Pipeline) -> None:
    def part(data: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(data)}}

    def refusal(messages: list[Any]) -> str:
        return str(refused(chat, messages=messages)["message"])

    text = {"type": "text", "text": "def read"}
    large = page(0, (300, 200))
    with client_of(trocr_folder / "bundle", max_body_bytes=2**12) as client:
        chat = client.chat.completions.create
        asked: list[Any] = [{"role": "user", "content": [part(png(large))]}]
        wanted = text_of(trocr, large)
        assert chat(model=MODEL, messages=asked).choices[0].message.content == wanted
        asked[0]["content"].append(text)
        wanted = text_of(trocr, large, "def read")
        assert chat(model=MODEL, messages=asked).choices[0].message.content == wanted
        twice: list[Any] = [{"role": "user", "content": [part(png(page()))] * 2}]
        assert "the message has 2 pictures and 0 texts" in refusal(twice)
        words: list[Any] = [{"role": "user", "content": "hello"}]
        assert "the prompt has no picture" in refusal(words)
        system: list[Any] = [{"role": "system", "content": "be brief"}, *asked]
        assert "holds no conversation" in refusal(system)
        cut: list[Any] = [{"role": "user", "content": [part(png(page())[:99])]}]
        assert "messages[0].content[0]: the picture is damaged" in refusal(cut)
        error = refused(client.completions.create, prompt="hello")
        assert "reads pictures, a str is given" in error["message"]


PICTURE = {"type": "image", "image": page()}
REFUSED: list[tuple[Any, str]] = [
    ("hello", "reads pictures, a str is given as its prompt; use messages, or --image"),
    ([5, 7], "reads pictures, a list is given"),
    ([{"role": "user", "content": "hello"}], "the prompt has no picture"),
    ([{"role": "assistant", "content": [PICTURE]}], "or others' messages"),
    ([{"role": "user", "content": [PICTURE]}] * 2, "or others' messages"),
    ([{"role": "user", "content": []}], "the message has 0 pictures and 0 texts"),
    ([{"role": "user", "content": ["hello"]}], "messages[0].content[0] is a str"),
    ([{"role": "user", "content": [{"type": "audio", "audio": b""}]}], "type 'audio', which this"),
    (message(b"\x89PNG\r\n" + bytes(99)), "messages[0].content[0]: the picture is not readable"),
    (message(Image.fromarray(np.zeros((1, 201, 3), np.uint8))), "at most 200 times as long"),
]


@pytest.mark.parametrize(("prompt", "words"), REFUSED)
def test_refused_prompts(trocr: Pipeline, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        trocr.generate(prompt)


def test_other_uses_are_refused(trocr: Pipeline, donut: Pipeline) -> None:
    with pytest.raises(InputError, match="not sound, which transcribe needs"):
        trocr.transcribe(b"")
    with pytest.raises(InputError, match="prompt_logprobs is true"):
        trocr.generate(message(page()), prompt_logprobs=True)
    long = Image.fromarray(np.zeros((30, 3000, 3), np.uint8))
    with pytest.raises(InputError, match="3000 x 30 pixels, which is too long for the page"):
        donut.generate(message(long))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"height": 0}, "picture: height is 0, expected a number above 0"),
        ({"width": 100_000}, "picture: width is 100000, expected at most 8192"),
        ({"resample": 9}, "picture: resample is 9"),
        ({"std": [0.0, 1.0, 1.0]}, "picture: mean and std"),
        ({"num_positions": 9}, "encoder.onnx"),
    ],
)
def test_damaged_entries(
    change: dict[str, Any], words: str, trocr_folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(trocr_folder / "bundle", tmp_path / "bundle")

    def change_both(data: dict[str, Any]) -> None:
        for role in ("target", "draft"):
            data[role]["encoder"]["picture"].update(change)

    with pytest.raises(BundleError, match=re.escape(words)):
        Pipeline.from_bundle(edited(copy, change_both))


WRONG_PROCESSORS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "preprocessor_config.json"),
    ({"image_processor_type": "CLIPImageProcessor"}, "it is a CLIPImageProcessor, expected one"),
    ({"do_resize": False}, "do_resize is false"),
    ({"size": {"shortest_edge": 32}}, "only a fixed size"),
    ({"do_center_crop": True, "crop_size": {"height": 16, "width": 16}}, "only a fixed size"),
    ({"size": {"height": 64, "width": 64}}, "but the encoder reads (32, 32)"),
]


@pytest.mark.parametrize(("change", "words"), WRONG_PROCESSORS)
def test_processors_that_are_refused(
    change: dict[str, Any] | None, words: str, tmp_path: Path
) -> None:
    folder = write_picture_reader(tmp_path / "model")
    file = folder / "preprocessor_config.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    check_refused(folder, words)


def check_refused(folder: Path, words: str, **options: Any) -> None:
    config = ExportConfig(target=str(folder), output=folder.parent / "bundle", **options)
    with pytest.raises(ExportError, match=re.escape(words)):
        export_bundle(config, report=lambda _: None)


def test_options_that_are_refused(tmp_path: Path) -> None:
    folder = write_picture_reader(tmp_path / "model")
    check_refused(folder, "whose source is a picture of fixed size", max_source=64)
    other = write_picture_reader(tmp_path / "donut", "donut")
    check_refused(folder, "both must read the same source", draft=str(other))
    distill = DistillConfig(target=str(folder), data=(str(tmp_path),), output=tmp_path / "draft")
    with pytest.raises(ExportError, match="reads pictures, of which no draft can be trained"):
        target = open_target(str(folder), ModelOptions())
        draft_kind(distill, target).check(distill, target)
