"""Starts wyoming-faster-whisper with a model, sends it a WAV file, and prints the transcript.

Arguments: folder of the model, file, folder for its data. The last line is {"text": TEXT}.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import wave

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient

LONGEST_S = 240.0


async def transcribed(port: int, file: str) -> str:
    with wave.open(file) as opened:
        form = {"rate": opened.getframerate(), "width": 2, "channels": 1}
        sound = opened.readframes(opened.getnframes())
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Transcribe(language="en").event())
        await client.write_event(AudioStart(**form).event())
        for first in range(0, len(sound), 3200):
            await client.write_event(AudioChunk(audio=sound[first : first + 3200], **form).event())
        await client.write_event(AudioStop().event())
        while (event := await client.read_event()) is not None:
            if Transcript.is_type(event.type):
                return Transcript.from_event(event).text
    raise RuntimeError("the server closed the connection without a transcript")


def main() -> None:
    model, file, data = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--uri", f"tcp://127.0.0.1:{port}", "--model", model, "--data-dir", data]
    options += ["--stt-library", "faster-whisper", "--beam-size", "2", "--cpu-threads", "1"]
    command = [sys.executable, "-m", "wyoming_faster_whisper", *options, "--language", "en"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        begin = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                text = asyncio.run(asyncio.wait_for(transcribed(port, file), LONGEST_S))
                break
            if server.poll() is not None or time.monotonic() - begin > LONGEST_S:
                sys.exit(f"the server does not listen; its exit code: {server.poll()}")
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
