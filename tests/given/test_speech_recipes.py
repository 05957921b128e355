"""Transcriptions by Granite Speech, GLM-ASR, Qwen2-Audio: prompts, surfaces, refusals, adapters."""

import base64
import itertools
import json
from dataclasses import replace

import numpy as np
import openai
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint, open_pair, source_of
from dsbd_export.progress import silent
from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_ort.speech.prompted.recipes import RECIPES, Asked
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.media.given_sound import StackedSound, WindowedSound
from scripts.speech_checkpoints import MODELS, write_speech_model
from tests.given.speech_kinds import CLASSES, SpeechReference, inputs_of
from tests.given.test_transcription import saying
from tests.openai_server.running_server import MODEL, running_server
from tests.speech.audio_files import FLOAT, wav_bytes
from tests.speech.sounds import RATE, noise, speech_like

IN_CI = ("granite_speech",)
FEW = {"num_beams": 2, "max_new_tokens": 10}
GRANITE = "can you transcribe the speech into a written format?"
USER_TEXTS = [
    ("granite_speech", {}, GRANITE),
    ("granite_speech", {"text": "Write."}, "Write."),
    (
        "granite_speech",
        {"words": ("Kafka", "Max Brod")},
        "transcribe the speech to text. Keywords: Kafka, Max Brod",
    ),
    ("granite_speech", {"words": ("Kafka",), "text": "Write."}, "Write. Keywords: Kafka"),
    (
        "granite_speech",
        {"task": "translate"},
        "translate the speech to English with proper punctuation and capitalization.",
    ),
    ("granite_speech_plus", {}, f" {GRANITE}"),
    ("glmasr", {"words": ("Kafka",)}, "Please transcribe this audio into text"),
    ("qwen2_audio", {}, "Transcribe the speech into text."),
]


@pytest.mark.parametrize(("name", "options", "text"), USER_TEXTS)
def test_the_users_text(name, options, text):
    sound = {"type": "audio"}
    [message] = RECIPES[name].messages(sound, Asked(**options))
    assert message == {"role": "user", "content": [sound, {"type": "text", "text": text}]}


@pytest.fixture(
    scope="module",
    params=[
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in MODELS
    ],
)
def kind(request, speech_model):
    folder = speech_model(request.param)
    with Pipeline.from_bundle(folder / "bundle", num_threads=1) as pipe:
        yield request.param, pipe, folder / "target"


def test_transcriptions_are_transformers(kind):
    name, pipe, folder = kind
    reference, samples = SpeechReference.of(name, folder), speech_like(1.4)
    text = RECIPES[name].messages({}, Asked())[0]["content"][1]["text"]
    for beams in (1, 3):
        found = pipe.transcribe(samples, num_beams=beams, max_new_tokens=10)
        inputs = reference.inputs(samples, text)
        with torch.no_grad():
            wanted = reference.model.generate(
                **inputs, num_beams=beams, do_sample=False, max_new_tokens=10
            )
        new = wanted[0, inputs["input_ids"].shape[1] :].tolist()
        end = MODELS[name].tokens[MODELS[name].special_tokens[1]]
        said = [*found.segments, *found.skipped]
        assert len(said) == 1 and found.language is None
        if found.segments:
            assert [*found.segments[0].token_ids] == [each for each in new if each != end]


def test_answers_and_long_sounds(kind):
    name, pipe, _ = kind
    end = pipe.bundle.manifest.target.eos_token_ids[0]
    said = pipe.transcribe(speech_like(1.0), **saying(pipe, " The quick fox. ", end))
    assert (said.language, said.text) == (None, "The quick fox.")
    samples = speech_like(9.0)
    whole = pipe.transcribe(samples, **FEW)
    parts = sorted([*whole.segments, *whole.skipped], key=lambda each: each.start)
    assert len(parts) > 1 if name == "qwen2_audio" else parts
    assert parts[0].start == 0.0 and parts[-1].end == 9.0
    for before, after in itertools.pairwise(parts):
        assert before.end == after.start
    for each in whole.segments:
        part = samples[round(each.start * RATE) : round(each.end * RATE)]
        assert pipe.transcribe(part, **FEW).segments[0].token_ids == each.token_ids


def test_hot_words(kind):
    name, pipe, _ = kind
    found = pipe.transcribe(speech_like(1.0), hot_words=["fox"], hot_word_gain=60.0, **FEW)
    assert "fox" in found.text
    plain = pipe.transcribe(speech_like(1.0), **FEW)
    favoured = pipe.transcribe(speech_like(1.0), hot_words=["fox"], **FEW)
    assert RECIPES[name].reads_words == name.startswith("granite")
    assert (plain.text, plain.stats.num_prompt_tokens) != (
        favoured.text,
        favoured.stats.num_prompt_tokens,
    ) or not RECIPES[name].reads_words


REFUSED = [
    ({"language": "de"}, "language is 'de', but the prompts of this model name none"),
    ({"task": "sing"}, "task is 'sing'"),
    ({"return_timestamps": True}, "this model writes no times"),
    ({"no_speech_threshold": 0.6}, "gives no probability that nobody speaks"),
    ({"initial_prompt": 7}, "initial_prompt is a int"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused(kind, options, words):
    with pytest.raises(InputError) as raised:
        kind[1].transcribe(noise(0.5), **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_translations(kind):
    name, pipe, _ = kind
    if name == "granite_speech":
        assert pipe.transcribe(noise(0.5), task="translate", **FEW).task == "translate"
        return
    with pytest.raises(InputError, match="writes the language that is spoken"):
        pipe.transcribe(noise(0.5), task="translate", **FEW)


def test_over_http(kind):
    name, pipe, _ = kind
    data = wav_bytes(speech_like(1.2), kind=FLOAT, bits=32)
    wanted = pipe.transcribe(data, **FEW)
    part = {"type": "audio", "audio": data}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Hello"}]}]
    chat = pipe.generate(messages, temperature=0.0, **FEW).sequences[0]
    with Service(pipe) as service, running_server(service, defaults={"max_new_tokens": 10}) as run:
        with run.client().with_options(timeout=300) as client:
            text = client.audio.transcriptions.create(
                file=("a.wav", data), model=MODEL, extra_body={"num_beams": 2}
            )
            encoded = wav_part(data)
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": [encoded, messages[0]["content"][1]]}],
                temperature=0,
                extra_body={"num_beams": 2},
            )
            if name == "qwen2_audio":
                too_long = wav_part(wav_bytes(noise(3.0), kind=FLOAT, bits=32))
                with pytest.raises(openai.BadRequestError, match="this model reads 2 s at most"):
                    client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": [too_long]}]
                    )
    assert text.text == wanted.text
    assert answer.choices[0].message.content == chat.text


def wav_part(data):
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def adapted(folder):
    """Write a tiny Granite Speech with an adapter for sound next to its weights."""
    write_speech_model("granite_speech", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "has_lora_adapter": True}))
    model = CLASSES["granite_speech"].from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    modules = r".*language_model.*(q_proj|v_proj)"
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, lora_dropout=0.1)
    with quiet_libraries():
        made = peft.PeftModel(model, lora).eval()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.5)
        made.save_pretrained(folder)
    return folder, made


IDS = torch.arange(2, 30)[None]


@torch.no_grad()
def logits_of(model):
    return model(input_ids=IDS).logits.numpy()


def loaded(folder):
    return source_of(open_checkpoint("target", folder, ModelOptions())).load("fp32", silent)


@pytest.mark.parametrize("is_older", [False, True])
def test_the_adapter_for_sound_is_merged(tmp_path, is_older):
    folder, theirs = adapted(tmp_path / "target")
    file = folder / "adapter_model.safetensors"
    if is_older:  # names before transformers 5
        weights = load_file(file)
        names = {
            name: name.replace("model.language_model", "language_model.model") for name in weights
        }
        save_file({names[name]: weight for name, weight in weights.items()}, file)
    wanted = logits_of(theirs)
    with theirs.disable_adapter():
        without = logits_of(theirs)
    assert np.abs(logits_of(loaded(folder)) - wanted).max() <= 2e-5
    assert np.abs(without - wanted).max() > 0.1


def test_adapters_that_do_not_fit(tmp_path):
    folder, _ = adapted(tmp_path / "target")
    file, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights, content = load_file(file), json.loads(settings.read_text())
    save_file({name.replace("layers.1", "layers.7"): each for name, each in weights.items()}, file)
    with pytest.raises(ExportError, match=r"has the weight .*layers\.7.* does not fit"):
        loaded(folder)
    settings.write_text(json.dumps({**content, "use_dora": True}))
    with pytest.raises(ExportError, match="has use_dora, expected a plain LoRA"):
        loaded(folder)
    file.write_bytes(b"no weights")
    with pytest.raises(ExportError, match="cannot be read"):
        loaded(folder)
    settings.unlink()
    with pytest.raises(ExportError, match=r"no adapter .*has_lora_adapter"):
        loaded(folder)
    with pytest.raises(ExportError, match="has no adapter"):
        open_pair(ExportConfig(target=str(folder), adapter=str(folder), output=tmp_path / "b"))


STACKED = StackedSound(
    recipe="granite_speech",
    sampling_rate=16_000,
    num_mels=8,
    n_fft=512,
    window_length=400,
    hop_length=160,
    block_pairs=20,
    window_pairs=15,
    window_rows=3,
    num_characters=256,
)
WINDOWED = WindowedSound(
    recipe="glmasr",
    sampling_rate=16_000,
    num_mels=8,
    n_fft=400,
    hop_length=160,
    num_frames=200,
    merged=4,
    hides_padding=False,
    most_windows=3,
)
WRONG = [
    (STACKED, {"window_length": 600}, "window_length is 600"),
    (STACKED, {"window_rows": 16}, "window_rows is 16"),
    (STACKED, {"num_characters": -1}, "num_characters is -1"),
    (STACKED, {"block_pairs": 0}, "block_pairs is 0"),
    (STACKED, {"hop_length": 10**9}, "hop_length is 1000000000"),
    (WINDOWED, {"num_frames": 204}, "num_frames is 204"),
    (WINDOWED, {"merged": 0}, "merged is 0"),
    (WINDOWED, {"num_mels": 513}, "num_mels is 513"),
]


@pytest.mark.parametrize(("entry", "change", "words"), WRONG)
def test_entries_are_checked(entry, change, words):
    entry.check("manifest")
    with pytest.raises(BundleError, match=words):
        replace(entry, **change).check("manifest")


@pytest.mark.parametrize("entry", [STACKED, WINDOWED], ids=lambda entry: entry.kind)
def test_features_of_other_shapes(entry):
    for shape in [(9, 200), (8, 1), (8,)]:
        with pytest.raises(InputError, match="the features of a sound have shape"):
            entry.pieces(np.zeros(shape, np.float32))


def test_the_end_of_a_sound_that_is_too_short_for_a_row_has_no_piece():
    features = np.zeros((8, 400), np.float32)
    assert [each.num_rows for each in WINDOWED.pieces(features, 206)] == [25]
    assert [each.num_rows for each in WINDOWED.pieces(features, 207)] == [25, 1]
    assert WINDOWED.num_rows(206) == 25 and WINDOWED.num_rows(207) == 26
    assert [each.num_rows for each in WINDOWED.pieces(features[:, :200], 1)] == [1]


def test_prompts_keep_their_rows(kind):
    name, pipe, _ = kind
    inputs = inputs_of(pipe, noise(0.5))
    number = inputs.prompt_ids.count(MODELS[name].placeholder)
    assert number == sum(piece.num_rows for piece in inputs.source.pieces)
