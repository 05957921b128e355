"""dsbd-run for a person: one prompt after another, a chat that remembers, Ctrl-C and Ctrl-D."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from dsbd_ort.batch.answers import Answer
from dsbd_ort.commands.run import responder_of, talk
from dsbd_ort.commands.run_arguments import RunArguments
from dsbd_ort.commands.speech_options import SpeechArguments
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.runtime.bundle_edits import with_files

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"


class Person:
    """Types the given lines; an exception class stands for a key such as Ctrl-C."""

    def __init__(self, *lines):
        self._lines = list(lines)

    def read_line(self):
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def test_every_line_is_answered_until_ctrl_d(capsys):
    seen = []

    def respond(text, is_interrupted):
        seen.append(text)
        if text == "bad":
            raise InputError("no such prompt")
        if text == "long":
            os.kill(os.getpid(), signal.SIGINT)
            assert is_interrupted()
        else:
            assert not is_interrupted()
        return Answer("", None)

    talk(respond, Person("a", "", "  ", KeyboardInterrupt, "bad", "long", "b").read_line)
    assert seen == ["a", "bad", "long", "b"]
    assert "Error: no such prompt" in capsys.readouterr().err


def test_sigterm_ends_it():
    def respond(_text, _is_interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
        return Answer("", None)

    with pytest.raises(SystemExit) as ended:
        talk(respond, Person("a", "never").read_line)
    assert ended.value.code == 143


NO_AUDIO = SpeechArguments(keywords={}, timestamps=None, output_format="txt", output_dir=None)


def chat_request(bundle, **more):
    return RunArguments(
        pipeline=PipelineSettings(bundle=bundle.path, num_threads=1),
        options={"max_new_tokens": 5, "strategy": "greedy"},
        chat=True,
        speech=NO_AUDIO,
        more_files=(),
        **more,
    )


def test_a_chat_remembers_what_was_said(tiny_bundle, tmp_path, capsys):
    bundle = with_files(tiny_bundle.path, tmp_path / "bundle", {"chat_template.jinja": TEMPLATE})
    with Pipeline.from_bundle(bundle, num_threads=1) as pipeline:
        chat = responder_of(pipeline, chat_request(tiny_bundle, system="be kind"))
        first = chat.respond("one", lambda: False)
        cut_short = chat.respond("two", lambda: True)
        third = chat.respond("three", lambda: False)
        assert cut_short.result is None and len(cut_short.text) <= len(first.text) + 5
        messages = [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": cut_short.text},
            {"role": "user", "content": "three"},
        ]
        text = ChatTemplate(TEMPLATE, {}).render(messages)
        assert text.startswith("<s>be kind<u>one<a>")
        prompt = pipeline.tokenizer.encode(text, add_special_tokens=False)
        assert pipeline.chat_prompt(messages) == prompt
        alone = pipeline.generate(prompt, max_new_tokens=5, strategy="greedy")
        assert third.result.sequences == alone.sequences
    assert capsys.readouterr().out == f"{first.text}\n{cut_short.text}\n{third.text}\n"


def test_at_a_terminal_prompts_are_asked_for_and_ctrl_c_ends_an_answer(tiny_bundle):
    primary, secondary = pty.openpty()
    code = "from dsbd_ort.cli import run; run()"
    arguments = [str(tiny_bundle.path), "--threads", "1", "--max-new-tokens", "1500"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--strategy", "greedy", "--eos-token-id", "257"],
        preexec_fn=lambda: os.login_tty(secondary),
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(secondary)
    screen = bytearray()

    def watch():
        try:
            while read := os.read(primary, 4096):
                screen.extend(read)
        except OSError:  # the other side is closed
            pass

    def wait_for(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end and process.poll() is None, bytes(screen)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    wait_for(lambda: b">>> " in screen)
    os.write(primary, b"ab\n")
    wait_for(lambda: screen.count(b"ab") > 1 and len(screen) > 30)
    os.write(primary, b"\x03")  # Ctrl-C
    wait_for(lambda: screen.count(b">>> ") == 2)
    os.write(primary, b"\x04")  # Ctrl-D
    assert process.wait(timeout=60) == 0
    watcher.join()
    os.close(primary)
    assert b"Traceback" not in screen
