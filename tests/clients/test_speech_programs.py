"""Programs that import faster-whisper, run on the adapter: their texts are those of the adapter.

Its own tests run too, if DSBD_FASTER_WHISPER names a checkout of github.com/SYSTRAN/faster-whisper
and DSBD_WHISPER a bundle: ``pytest -m clients -s tests/clients/test_speech_programs.py``. They
expect the texts of Whisper tiny.
"""

import json
import os
import shutil
import subprocess

import pytest

from dsbd_ort.speech.faster_whisper import WhisperModel
from tests.clients.environments import PROGRAMS, ROOT, command, environment
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import speech_like

pytestmark = [pytest.mark.clients]
CLIENT = "faster_whisper"
PATHS = [PROGRAMS / "aliases", ROOT, ROOT / "export", ROOT / "runtime"]
ON_OURS = {"PYTHONPATH": ":".join(map(str, PATHS))}


@pytest.fixture
def speech_bundle(whisper):
    return whisper / "bundle"


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    file = tmp_path_factory.mktemp("audio") / "sound.wav"
    file.write_bytes(wav_bytes(speech_like(2.5)))
    return file


def text_of(bundle, audio, **options):
    model = WhisperModel(bundle, cpu_threads=1)
    segments, _ = model.transcribe(str(audio), language="en", **options)
    found = [segment.text for segment in segments]
    model.close()
    return found


def test_whisper_ctranslate2(speech_bundle, audio, tmp_path):
    folder = shutil.copytree(speech_bundle, tmp_path / "model")
    (folder / "model.bin").touch()  # it looks for this file
    arguments = ["whisper-ctranslate2", "--model_directory", str(folder), "--language", "en"]
    arguments += ["--temperature_increment_on_fallback", "None", "--no_speech_threshold", "2"]
    arguments += ["--output_format", "json", "--output_dir", str(tmp_path), "--threads", "1"]
    command(CLIENT, [*arguments, str(audio)], tmp_path, ON_OURS)
    found = json.loads((tmp_path / "sound.json").read_text())
    wanted = text_of(speech_bundle, audio, temperature=0.0, no_speech_threshold=2.0)
    assert [segment["text"] for segment in found["segments"]] == wanted != []


def test_wyoming(speech_bundle, audio, tmp_path):
    program = str(PROGRAMS / "wyoming_client.py")
    arguments = ["python", program, str(speech_bundle), str(audio), str(tmp_path)]
    found = json.loads(command(CLIENT, arguments, tmp_path, ON_OURS).splitlines()[-1])
    assert isinstance(found["text"], str)


def test_faster_whisper_itself(tmp_path):
    checkout, bundle = (os.environ.get(f"DSBD_{name}") for name in ("FASTER_WHISPER", "WHISPER"))
    if not checkout or not bundle:
        pytest.skip("DSBD_FASTER_WHISPER and DSBD_WHISPER are not set")
    tests = shutil.copytree(f"{checkout}/tests", tmp_path / "tests")
    python = str(environment(CLIENT) / "python")
    options = ["-q", "-p", "no:cacheprovider", str(tests / "test_transcribe.py")]
    done = subprocess.run(
        [python, "-m", "pytest", *options],
        **{"capture_output": True, "text": True, "env": {**os.environ, **ON_OURS}},
    )
    print(done.stdout[-3000:])
    assert " passed" in done.stdout
    for name in ("empty_audio", "prefix_with_timestamps", "hotwords", "transcribe_signature"):
        assert f"test_{name}" not in done.stdout  # tests that fail are named
