"""Small peers, requests and folders for the tests."""

import sys
from pathlib import Path

from lab.peers.catalog import Peer, PeerRun
from lab.peers.prepare import ReadyRun
from lab.peers.rounds import Request
from lab.peers.runner_process import ROOT, RunnerProcess
from lab.peers.runners.serve import Job


def run_of(name="counting", precision="fp32", **options):
    return PeerRun(name=name, precision=precision, task="sampling", options=options)


def peer_of(*runs, source="checkpoints"):
    return Peer(name="fake", runner="fake_runner", source=source, runs=runs)


def job_of(run, folder, target="t", draft="d"):
    pair = {"target": str(target), "draft": str(draft), "folder": str(folder)}
    return Job(
        **pair, precision=run.precision, task=run.task, options=dict(run.options), num_threads=1
    )


def ready_run(run, folder):
    return ReadyRun(
        peer=peer_of(run), run=run, python=Path(sys.executable), job=job_of(run, folder)
    )


def start_fake(run, log, **options):
    options = {"package": "tests.lab.peers", "import_from": (ROOT,), **options}
    return RunnerProcess(run.python, "fake_runner", run.job, log, **options)


def request_of(peer, run, seconds, tokens=(1, 2), index=0, number=0, precision="fp32", **more):
    given = {"prompt_index": index, "round": number, "seed": 0, "seconds": seconds}
    tool = {"peak_bytes": 10**6 * (1 + number), "version": "1.2", "settings": "counting"}
    more = {"num_iterations": None, "is_valid": None} | more
    names = {"peer": peer, "run": run, "precision": precision, "token_ids": list(tokens)}
    return Request(**names, **given, **tool, **more)
