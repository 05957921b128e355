"""Prints what ``faster_whisper``, whichever module that is, makes of audio files, line by line.

Arguments: model, options as JSON, files. A line has file, language and its probability, segments,
and seconds of the processor.
"""

import dataclasses
import json
import sys
import time

import faster_whisper


def main() -> None:
    folder, options, *files = sys.argv[1:]
    given = json.loads(options)
    batch_size = given.pop("batch_size", None)
    opened = faster_whisper.WhisperModel(folder, device="cpu", cpu_threads=1)
    model = opened if batch_size is None else faster_whisper.BatchedInferencePipeline(opened)
    if batch_size is not None:
        given["batch_size"] = batch_size
    for file in files:
        begin = time.process_time()
        segments, info = model.transcribe(file, **given)
        found = [dataclasses.asdict(segment) for segment in segments]
        seconds = time.process_time() - begin
        answer = {"file": file, "language": info.language, "segments": found, "seconds": seconds}
        print(json.dumps({**answer, "probability": info.language_probability}), flush=True)


if __name__ == "__main__":
    main()
