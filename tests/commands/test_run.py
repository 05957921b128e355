"""dsbd-run as a person meets it: output, streams, errors in one line, clusters, traces."""

import json
import os
import pty
import re
from functools import partial

import pytest

from dsbd_ort.cli import run
from dsbd_ort.commands.transcription import SHOWN_STATS
from dsbd_ort.constraints.binding import KINDS
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE
from dsbd_ort.pipeline import Pipeline
from tests.commands.calls import assert_one_line_error, called, called_apart

dsbd_run = partial(called, run)
SHORT = ["--max-new-tokens", "8", "--top-k", "20", "--seed", "0"]


def test_text_goes_to_stdout_and_statistics_to_stderr(demo_bundle):
    done = dsbd_run(demo_bundle, "--prompt", "def f(x):", "--num-beams", 4, "--stats", *SHORT)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("def f(x):") and "num_iterations" not in done.stdout
    shown = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("│")]
    assert shown == list(SHOWN_STATS) and "--json has all of them" in done.stderr


def test_prompt_from_file_and_stdin_and_stream_print_the_same(demo_bundle, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("def f(x):")
    outputs = {
        dsbd_run(demo_bundle, "--prompt", "def f(x):", *SHORT).stdout,
        dsbd_run(demo_bundle, "--prompt-file", file, *SHORT).stdout,
        dsbd_run(demo_bundle, *SHORT, text="def f(x):").stdout,
        dsbd_run(demo_bundle, "--prompt", "def f(x):", "--stream", *SHORT).stdout,
    }
    assert len(outputs) == 1


def test_json_is_one_object_with_sequences_and_statistics(demo_bundle):
    arguments = ["--num-beams", "4", "--min-beams", "2", "--num-return-sequences", "2", "--json"]
    done = dsbd_run(demo_bundle, "--prompt", "def f(x):", *arguments, *SHORT)
    data = json.loads(done.stdout)
    assert done.stdout.startswith('{"sequences": [{"text": ')
    assert data["version"] == 1 and set(data) == {"version", "sequences", "stats", "seed"}
    assert len(data["sequences"]) == 2 and data["stats"]["num_prompt_tokens"] > 0
    assert set(data["sequences"][0]) == {"text", "token_ids", "token_logprobs", "logprob", "score", "finish_reason"}  # fmt: skip # noqa: E501


def test_a_predicted_file_drafts_and_changes_nothing(demo_bundle, tmp_path):
    arguments = ["--prompt", "def f(x):", "--json", "--strategy", "speculative", *SHORT]
    plain = json.loads(dsbd_run(demo_bundle, *arguments).stdout)
    file = tmp_path / "old.py"
    file.write_text(plain["sequences"][0]["text"] + " x" * 3000)  # longer than the context
    shape = ["--draft-length", "8"]
    found = json.loads(dsbd_run(demo_bundle, *arguments, *shape, "--predicted-file", file).stdout)
    ids = [[s["token_ids"] for s in each["sequences"]] for each in (found, plain)]
    assert ids[0] == ids[1]
    assert found["stats"]["drafter"] == "model+ngram" and found["stats"]["num_iterations"] == 1
    missing = dsbd_run(demo_bundle, *arguments, "--predicted-file", "/no/such/file")
    assert_one_line_error(missing, "--predicted-file /no/such/file cannot be read")


def test_token_ids_are_continued(demo_bundle):
    ids = [100, 101, 102]
    common = ["--ids", ",".join(map(str, ids)), *SHORT, "--num-beams", 2]
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        options = {"max_new_tokens": 8, "top_k": 20, "seed": 0, "num_beams": 2}
        wanted = pipeline.generate(ids, num_return_sequences=2, **options).sequences
    lines = [",".join(map(str, sequence.token_ids)) for sequence in wanted]
    assert dsbd_run(demo_bundle, *common).stdout == f"{lines[0]}\n"
    assert dsbd_run(demo_bundle, *common, "--num-return-sequences", 2).stdout.split() == lines
    (found,) = json.loads(dsbd_run(demo_bundle, *common, "--json").stdout)["sequences"]
    assert found["token_ids"] == wanted[0].token_ids and found["text"] == wanted[0].text
    for more in (["--prompt", "a"], ["--chat"], ["--stream"], ["--ids", "1x"], ["--ids", "99999"]):
        assert dsbd_run(demo_bundle, *common, *more).exit_code == 2


def test_every_decoding_option_is_an_option_of_the_command():
    flags = {parameter.name for parameter in run.params}
    fields = set(DecodingConfig.__dataclass_fields__) - {"constraint", *IN_PYTHON_ALONE}
    assert flags >= {*fields, *KINDS}


def test_a_stop_string_ends_the_text_streamed_or_not(demo_bundle):
    whole = dsbd_run(demo_bundle, "--prompt", "def f(x):", *SHORT).stdout
    stop = whole.removeprefix("def f(x):").rstrip("\n")[3:6]
    arguments = ["--prompt", "def f(x):", "--stop", stop, "--stop", "never", *SHORT]
    cut = whole.removeprefix("def f(x):").partition(stop)[0]
    assert dsbd_run(demo_bundle, *arguments).stdout == f"def f(x):{cut}\n"
    assert dsbd_run(demo_bundle, *arguments, "--stream").stdout == f"def f(x):{cut}\n"
    (sequence,) = json.loads(dsbd_run(demo_bundle, *arguments, "--json").stdout)["sequences"]
    assert sequence["finish_reason"] == "stop" and sequence["text"] == cut
    special = ["--stop", "<|begin|>", "--logit-bias", '{"0": 100}', *SHORT]
    done = dsbd_run(demo_bundle, "--prompt", "def f(x):", "--json", *special)
    (sequence,) = json.loads(done.stdout)["sequences"]
    assert (sequence["token_ids"][-1], sequence["finish_reason"]) == (0, "stop")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"ok \xc3"])
def test_a_prompt_that_is_no_utf_8_is_named(demo_bundle, tmp_path, text):
    file = tmp_path / "prompt.txt"
    file.write_bytes(text)
    assert_one_line_error(dsbd_run(demo_bundle, "--prompt-file", file), "prompt.txt cannot be read")
    assert_one_line_error(dsbd_run(demo_bundle, text=text), "the prompt on stdin cannot be read")


USER_ERRORS = [  # (arguments after the bundle, words of the message)
    ([], "no prompt; give --prompt, --prompt-file or text on stdin"),
    (["--prompt", "x", "--num-beams", "0"], "Error: --num-beams is 0; expected at least 1"),
    (
        ["--prompt", "x", "--num-beams", "many"],
        "Error: --num-beams is 'many'; expected a whole number",
    ),
    (
        ["--prompt", "x", "--temperature", "-1"],
        "Error: --temperature is -1.0; expected a finite number, 0 or more",
    ),
    (["--prompt", "x", "--top-p", "0"], "is 0.0; expected a number more than 0, up to 1"),
    (["--prompt", "x", "--length-penalty", "31"], "is 31.0; expected a number from -30 to 30"),
    (["--prompt", "x", "--replacement", "maybe"], "is 'maybe'; expected one of False, True"),
    (["--prompt", "x", "--strategy", "magic"], "--strategy is 'magic'; expected one of dsbd"),
    (["--prompt", "x", "--draft-beams", "4;4"], "'4;4'; expected a whole number or a list of them"),
    (
        ["--prompt", "x", "--eos-token-id", "a"],
        "--eos-token-id is 'a'; expected a token id or a list of them",
    ),
    (["--prompt", "x", "--eos-token-id", "99999999"], "has 99999999; expected 0 to 4095"),
    (["--prompt", "x", "--strategy", "greedy", "--eos-token-id", str(2**63)], "922337203685477580"),
    (["--prompt", "x", "--eos-token-id", "1,4096"], "eos_token_id has 4096; expected 0 to 4095"),
    (["--prompt", "x", "--provider", "tpu"], "tpu"),
    (["--prompt", "x", "--draft-provider", "tpu"], "tpu"),
    (["--prompt", "x", "--cuda-graphs"], "cuda_graphs is set, but provider 'cpu' has none"),
    (["--prompt", "x " * 3000], "this model's maximum context length is 2048 tokens"),
    (["--prompt", "x", "--max-new-tokens", "4000"], "use max_new_tokens 2046 or less"),
    (["--prompt", "x", "--prompt-file", "y"], "not both"),
    (["--prompt", "x", "--stop", ""], "--stop has an empty text"),
    (["--prompt", "x", "--chat"], "has no chat template"),
    (["--prompt", "x", "--system", "y"], "--system needs --chat"),
    (["--prompt", "x", "--workers", "2"], "--workers needs --input"),
    (["--prompt", "x", "--concurrency", "2"], "--concurrency needs --input or --audio"),
    (["--input", "x"], "--input needs --output"),
    (["--output", "x"], "--output needs --input"),
    (["--input", "/no/such/file", "--output", "x"], "--input /no/such/file cannot be read"),
    (["--input", "x", "--output", "y", "--prompt", "z"], "--input and --prompt contradict"),
    (["--input", "x", "--output", "y", "--json"], "--output gets one JSON object per line"),
    (
        ["--prompt", "x", "--stream", "--num-beams", "2", "--num-return-sequences", "2"],
        "--stream prints the best sequence alone",
    ),
    (["--prompt-file", "/no/such/file"], "/no/such/file"),
    (["--prompt", "x", "--stream", "--json"], "--stream"),
    (["--prompt", "x", "--colour"], "--colour"),
    (["--cluster", "auto"], "--cluster needs --input"),
    (["--input", "in", "--output", "out", "--replicas", "2"], "--replicas needs --cluster"),
    (
        ["--input", "in", "--output", "out", "--cluster", "auto", "--workers", "2"],
        "--cluster and --workers contradict each other",
    ),
    (["--input", "in", "--output", "out", "--cluster", "auto", "--replicas", "0"], "--replicas"),
    (["--input", "-", "--output", "-", "--cluster", "auto"], "give a folder"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_user_errors_end_in_one_line_and_exit_code_2(demo_bundle, arguments, words):
    assert_one_line_error(dsbd_run(demo_bundle, *arguments), words)


def test_the_empty_prompt_is_continued_as_from_python(demo_bundle):
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        text = pipeline.generate("", seed=0, max_new_tokens=8, top_k=20).sequences[0].text
    done = dsbd_run(demo_bundle, "--prompt", "", "--seed", 0, *SHORT)
    assert (done.exit_code, done.stdout) == (0, f"{text}\n")


def test_the_empty_prompt_without_a_first_token_is_refused(tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path) as pipeline:
        if pipeline.tokenizer.encode(""):
            pytest.skip("this tokenizer begins every text with a token")
    done = dsbd_run(tiny_bundle.path, "--prompt", "")
    assert_one_line_error(done, "the prompt has no token; give at least one")


def test_no_such_bundle(tmp_path):
    assert_one_line_error(dsbd_run(tmp_path / "nothing", "--prompt", "x"), "no bundle at")


def test_a_seed_that_nobody_gave_is_told_and_repeats_the_answer(demo_bundle):
    arguments = ["--prompt", "def f(x):", "--max-new-tokens", "8"]
    first = dsbd_run(demo_bundle, *arguments)
    told = re.search(r"^seed (\d+) \(--seed \1 repeats this answer\)$", first.stderr, re.MULTILINE)
    assert told, first.stderr
    assert dsbd_run(demo_bundle, *arguments, "--seed", told[1]).stdout == first.stdout
    for quiet in (["--seed", "3"], ["--temperature", "0"], ["--strategy", "greedy"]):
        assert "repeats this answer" not in dsbd_run(demo_bundle, *arguments, *quiet).stderr


def run_on_a_cluster(bundle, folder, **options):
    (folder / "in.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", folder / "in.jsonl", "--output", folder / "out"]
    return called_apart("run", bundle.path, *files, "--cluster", "auto", **options)


def test_without_ray_one_line_says_what_to_install(tiny_bundle, tmp_path):
    before = "import sys; sys.modules['ray'] = None"
    done = run_on_a_cluster(tiny_bundle, tmp_path, before=before)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "(ray)" in line and line.endswith(
        "in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[cluster]'"
    )
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(tiny_bundle, tmp_path):
    (tmp_path / "out").write_text("")
    done = run_on_a_cluster(tiny_bundle, tmp_path)
    assert done.returncode == 2
    assert "with --cluster it is a folder, which gets answers.jsonl" in done.stderr


TRACED = ["--prompt", "def", "--max-new-tokens", "6", "--seed", "0"]


def test_trace_changes_nothing_that_is_printed(tiny_bundle, tmp_path):
    options = [*TRACED, "--draft-policy", "fixed", "--json"]  # the same calls, the same rounding
    plain = dsbd_run(tiny_bundle.path, *options)
    traced = dsbd_run(tiny_bundle.path, *options, "--trace", tmp_path / "trace.json")
    assert traced.exit_code == 0, traced.stderr
    sequences = json.loads(traced.stdout)["sequences"]
    assert sequences == json.loads(plain.stdout)["sequences"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = [trace["hypotheses"][beam["hypothesis"]] for beam in trace["iterations"][-1]["beams"]]
    assert sequences[0]["token_ids"][-1] in [row["token"] for row in rows]


def test_one_prompt_after_another_is_refused(tmp_path):
    here, terminal = pty.openpty()
    arguments = [tmp_path / "nowhere", "--trace", tmp_path / "trace.html"]
    done = called_apart("run", *arguments, stdin=terminal)
    os.close(here)
    os.close(terminal)
    assert done.returncode == 2 and "draws one request; give its prompt" in done.stderr


def test_html_is_a_page(tiny_bundle, tmp_path):
    done = dsbd_run(tiny_bundle.path, *TRACED, "--stream", "--trace", tmp_path / "trace.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "trace.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("file", "more", "words"),
    [
        ("trace.txt", TRACED, "expected a name that ends in .html"),
        ("no/trace.html", TRACED, "make it first"),
        ("trace.html", ["--input", "a", "--output", "b"], "--input and --trace contradict"),
    ],
)
def test_refusals_come_before_the_bundle_is_opened(tmp_path, file, more, words):
    done = dsbd_run(tmp_path / "nowhere", *more, "--trace", tmp_path / file)
    assert done.exit_code == 2 and words in done.stderr
