"""Granite Speech, GLM-ASR, Qwen2-Audio: transcriptions, surfaces, refusals, adapters."""

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint, open_pair, source_of
from dsbd_export.progress import silent
from dsbd_ort.speech.prompted.recipes import RECIPES, Asked
from dsbd_runtime.errors import InputError
from scripts.speech_checkpoints import MODELS, write_speech_model
from tests.given.checks import LOGIT_LIMIT, forwarded
from tests.given.kinds import opened, params
from tests.given.speech_kinds import CLASSES, inputs_of
from tests.given.test_surfaces import part
from tests.given.test_transcription import saying
from tests.openai_server.running_server import MODEL, client_of, refused
from tests.ort_sessions import cpu_session
from tests.speech.audio_files import FLOAT, wav_bytes
from tests.speech.sounds import noise, speech_like

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


@pytest.fixture(scope="module", params=params(MODELS))
def kind(request, media_folder):
    with opened(request.param, media_folder(request.param)) as kind:
        yield kind


def test_ctc_logits_are_transformers(kind):
    name, pipe = kind.name, kind.pipe
    if not name.startswith("granite"):
        assert not pipe.bundle.manifest.target.given.medium.encoder_outputs
        return
    session, encoder = cpu_session(pipe.bundle.path / "target/encoder.onnx"), kind.model.model
    for seconds in kind.seconds:
        samples = noise(seconds, 3)
        [piece] = inputs_of(pipe, samples).source.pieces
        features = kind.inputs(samples, "the fox")["input_features"]
        with torch.no_grad():
            states = encoder.encoder(features).last_hidden_state
            wanted = encoder.encoder.out(states[..., -64:])[0].numpy()
        [found] = session.run(["ctc_logits"], dict(piece.inputs))
        # the head that spells a text has large weights
        assert np.abs(found[: len(wanted)] - wanted).max() <= 5e-4 * np.abs(wanted).max(), seconds


def test_beams_over_several_windows_have_the_scores_of_transformers_forward(kind):
    name, pipe = kind.name, kind.pipe
    if name == "qwen2_audio":  # reads one window
        with pytest.raises(InputError, match=r"3\.0 s is given, this model reads 2 s at most"):
            inputs_of(pipe, noise(3.0))
        return
    example = kind.of_samples(noise(5.1))
    options = {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4}
    (result,) = pipe.models.decoded([kind.request(example, **options)])
    prompt = example.inputs.prompt_ids
    for sequence in result.sequences:
        tokens = list(sequence.token_ids)
        if MODELS[name].placeholder in tokens:
            continue  # transformers' forward over a whole path expects a row there
        logits = torch.from_numpy(kind.logits([*prompt, *tokens], example))
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total = float(log_probs[range(len(tokens)), tokens].sum())
        assert sequence.score == pytest.approx(total / len(tokens), abs=1e-4)


def test_a_generated_placeholder_of_granite_is_read_as_the_first_token(kind):
    name, pipe = kind.name, kind.pipe
    inputs, found = inputs_of(pipe, noise(0.3)), []
    for token in (MODELS[name].placeholder, 0):
        with pipe.models.engines() as (engine, _):
            size = len(inputs.prompt_ids)
            ids, mask = [*inputs.prompt_ids, token], np.tri(size + 1, dtype=np.bool_)
            found.append(forwarded(engine, ids, range(size + 1), mask, inputs.source)[-1])
    is_alike = np.abs(found[0] - found[1]).max() <= LOGIT_LIMIT
    assert is_alike == name.startswith("granite")


def test_an_answer_is_its_text(kind):
    end = kind.pipe.bundle.manifest.target.eos_token_ids[0]
    said = kind.pipe.transcribe(speech_like(1.0), **saying(kind.pipe, " The quick fox. ", end))
    assert (said.language, said.text) == (None, "The quick fox.")


def test_hot_words(kind):
    name, pipe = kind.name, kind.pipe
    found = pipe.transcribe(speech_like(1.0), hot_words=["fox"], hot_word_gain=60.0, **FEW)
    assert "fox" in found.text
    plain = pipe.transcribe(speech_like(1.0), **FEW)
    favoured = pipe.transcribe(speech_like(1.0), hot_words=["fox"], **FEW)
    assert RECIPES[name].reads_words == name.startswith("granite")
    assert (plain.text, plain.stats.num_prompt_tokens) != (
        favoured.text,
        favoured.stats.num_prompt_tokens,
    ) or not RECIPES[name].reads_words


def test_languages_and_tasks(kind):
    """Refusals that differ between kinds; test_transcription.py has the others."""
    with pytest.raises(InputError, match="'de', but the prompts of this model name none"):
        kind.pipe.transcribe(noise(0.5), language="de")
    if kind.name == "granite_speech":
        assert kind.pipe.transcribe(noise(0.5), task="translate", **FEW).task == "translate"
        return
    with pytest.raises(InputError, match="writes the language that is spoken"):
        kind.pipe.transcribe(noise(0.5), task="translate", **FEW)


def test_over_http(kind, media_folder):
    data = wav_bytes(speech_like(1.2), kind=FLOAT, bits=32)
    wanted = kind.pipe.transcribe(data, **FEW)
    question = {"type": "text", "text": "Hello"}
    messages = [{"role": "user", "content": [{"type": "audio", "audio": data}, question]}]
    chat = kind.pipe.generate(messages, temperature=0.0, **FEW).sequences[0]
    bundle, beams = media_folder(kind.name) / "bundle", {"extra_body": {"num_beams": 2}}
    with client_of(bundle, defaults={"max_new_tokens": 10}) as client:
        text = client.audio.transcriptions.create(file=("a.wav", data), model=MODEL, **beams)
        create, content = client.chat.completions.create, [part(data), question]
        messages = [{"role": "user", "content": content}]
        answer = create(model=MODEL, messages=messages, temperature=0, **beams)
        if kind.name == "qwen2_audio":
            too_long = part(wav_bytes(noise(3.0), kind=FLOAT, bits=32))
            error = refused(create, messages=[{"role": "user", "content": [too_long]}])
            assert "this model reads 2 s at most" in error["message"]
    assert text.text == wanted.text
    assert answer.choices[0].message.content == chat.text


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
