"""From the arguments of dsbd-run to a request or a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dsbd_ort.batch.job import run_batch
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.commands.answer_output import OutputStyle
from dsbd_ort.commands.batch_of_arguments import batch_of_arguments
from dsbd_ort.commands.decoding_options import given_options
from dsbd_ort.commands.prompt_source import read_prompt
from dsbd_ort.commands.run import RunRequest, run
from dsbd_ort.pipeline_settings import PipelineSettings
from dsbd_ort.trace_page.trace_file import check_trace_path


def run_from_arguments(
    *,
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    input: Path | None,
    output: Path | None,
    workers: int | None,
    concurrency: int | None,
    cluster: str | None,
    replicas: int | None,
    chat: bool,
    system: str | None,
    provider: str,
    draft_provider: str | None,
    threads: int | None,
    cuda_graphs: bool,
    verify: bool,
    no_prefix_cache: bool,
    stream: bool,
    as_json: bool,
    stats: bool,
    trace: Path | None,
    **decoding: Any,
) -> int:
    """Answer one prompt, those of a person, or those of a file; return the exit code.

    ``decoding`` are all fields of DecodingConfig, None or () where not given.
    """
    options = given_options(decoding)
    if trace is not None:
        check_trace_path(trace)
    pipeline = PipelineSettings(
        bundle=bundle,
        provider=provider,
        draft_provider=draft_provider,
        num_threads=threads,
        cuda_graphs=cuda_graphs,
        verify=verify,
        prefix_cache=not no_prefix_cache,
    )
    if input is not None and output is not None:
        settings = BatchSettings(pipeline=pipeline, options=options, is_chat=chat, system=system)
        console = Console(stderr=True)
        batch = batch_of_arguments(
            settings,
            console,
            input=input,
            output=output,
            workers=workers,
            concurrency=concurrency,
            cluster=cluster,
            replicas=replicas,
        )
        return run_batch(batch, console)
    text = read_prompt(prompt, prompt_file)
    if text is None and trace is not None:
        raise click.UsageError(
            f"--trace {trace} draws one request; give its prompt with --prompt, --prompt-file or "
            "on stdin"
        )
    request = RunRequest(
        pipeline=pipeline,
        prompt=text,
        options=options,
        is_chat=chat,
        system=system,
        # Somebody who waits at the terminal sees text as it comes, unless more than one is asked.
        style=OutputStyle(
            stream=stream
            or (text is None and not as_json and options.get("num_return_sequences", 1) == 1),
            as_json=as_json,
            stats=stats,
        ),
        trace=trace,
    )
    return run(request)
