"""A tool that hears how many samples there are."""

from lab.transcription.runners.serve import ENCODER, Asked, Job, Opened, Samples, Stopwatch, serve


class Encoder:
    def encode(self) -> str:
        return "samples"


def open_job(job: Job, stopwatch: Stopwatch) -> Opened:
    """Return what counts samples; each look at the clock is a second later."""
    ticks = iter(range(100))
    stopwatch.clock = lambda: float(next(ticks))
    stopwatch.watch(Encoder, "encode", ENCODER)
    print("printed by a library")

    def transcribe(samples: Samples, asked: Asked) -> tuple[str, int]:
        if asked.language == "xx":
            raise ValueError("no language xx")
        return f"{len(samples)} {Encoder().encode()}", asked.num_beams

    return Opened(version="1.0", settings=f"{job.precision}", transcribe=transcribe)


if __name__ == "__main__":
    serve(open_job)
