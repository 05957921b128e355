"""lm-eval and guidellm: the figures are those of the pipeline, and nothing is refused."""

import json
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from tests.clients.environments import command
from tests.openai_server.running_server import MODEL

pytestmark = pytest.mark.clients
TASKS = Path(__file__).with_name("tasks")


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lm_eval(recorded, demo_bundle, tmp_path):
    """A generation task and a log-likelihood task, sample by sample."""
    for task in TASKS.glob("*.yaml"):
        text = task.read_text().replace("DATA", str(TASKS))
        (tmp_path / task.name).write_text(text)
    with recorded(demo_bundle) as served:
        model = {
            "model": MODEL,
            "base_url": f"{served.url}/v1/completions",
            "tokenizer": demo_bundle,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
        }
        arguments = ["lm_eval", "run", "--model", "local-completions", "--tasks"]
        arguments += ["code_choices,code_lines", "--include_path", str(tmp_path), "--log_samples"]
        arguments += ["--output_path", str(tmp_path / "out"), "--model_args"]
        arguments += [",".join(f"{name}={value}" for name, value in model.items())]
        command("lm_eval", arguments, tmp_path)
        served.check_traffic()
    (results,) = (tmp_path / "out" / MODEL).glob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    (choices,) = (tmp_path / "out" / MODEL).glob("samples_code_choices_*.jsonl")
    (lines,) = (tmp_path / "out" / MODEL).glob("samples_code_lines_*.jsonl")
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
        check_choices(pipeline, lines_of(choices), figures["code_choices"]["acc,none"])
        check_lines(pipeline, lines_of(lines), figures["code_lines"]["exact_match,none"])


def as_sent(pipeline, text):
    """Return the token ids that lm-eval sends for a text: without special tokens."""
    return pipeline.tokenizer.encode(text, add_special_tokens=False)


def check_choices(pipeline, samples, accuracy):
    num_right = 0
    for sample in samples:
        document, sums = sample["doc"], []
        for choice, (found,) in zip(document["choices"], sample["resps"], strict=True):
            context = as_sent(pipeline, document["context"])
            whole = as_sent(pipeline, document["context"] + choice)
            scored = pipeline.generate(whole, max_new_tokens=1, prompt_logprobs=True)
            logprobs = scored.prompt_logprobs.token_logprobs[len(context) :]
            sums.append(sum(logprobs))
            assert float(found[0]) == pytest.approx(sums[-1], abs=1e-3)
        num_right += sums.index(max(sums)) == document["gold"]
    assert accuracy == num_right / len(samples) > 0.8


def check_lines(pipeline, samples, exact):
    num_equal = 0
    for sample in samples:
        options = {"strategy": "speculative-beam-search", "num_beams": 1}  # at temperature 0
        options |= {"max_new_tokens": 12, "stop_strings": "\n"}
        context = as_sent(pipeline, sample["doc"]["context"])
        wanted = pipeline.generate(context, **options).sequences[0].text
        assert sample["resps"] == [[wanted]]
        num_equal += wanted == sample["doc"]["line"]
    assert exact == num_equal / len(samples) > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(recorded, demo_chat, tmp_path, path):
    """Twelve requests, four at a time: as many tokens as were asked for, and no error."""
    output = tmp_path / "report.json"
    with recorded(demo_chat) as served:
        backend = f"kind=openai_http,target={served.url},model={MODEL},request_format={path}"
        arguments = ["guidellm", "run", "--disable-console", "--backend", backend]
        arguments += ["--profile", "kind=concurrent,streams=4"]
        arguments += ["--constraint", "kind=max_requests,count=12"]
        arguments += ["--tokenizer", f"kind=huggingface_auto,model={demo_chat}"]
        arguments += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16"]
        command("guidellm", [*arguments, "--output", f"kind=json,path={output}"], tmp_path)
        served.check_traffic()
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert len(done) == 12 and not benchmark["requests"]["errored"]
    assert [request["output_metrics"]["text_tokens"] for request in done] == [16] * 12
    bodies = served.recorder.bodies[path]
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)
