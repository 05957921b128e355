"""The training loop and lessons on disk: a killed run ends as one that was not."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from dsbd_distill import training
from dsbd_distill.lesson import Lesson
from dsbd_distill.training import Budget, Muon, Schedule, Trainer
from dsbd_export.errors import ExportError


def test_the_rate_rises_holds_and_falls():
    places = [(0, 0.0), (49, 0.01), (100, 0.02), (500, 0.5), (750, 0.75), (999, 1.0)]
    rates = [Schedule(learning_rate=2.0).rate(step, progress) for step, progress in places]
    assert rates == pytest.approx([0.02, 1.0, 2.002, 2.002, 1.002, 0.002])


@pytest.mark.parametrize("shape", [(32, 80), (80, 32)])
def test_muon_is_that_of_torch_without_its_bf16(shape):
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    own, theirs = (nn.Parameter(first.clone()) for _ in range(2))
    optimizers = [
        Muon([own], lr=0.01, weight_decay=0.05),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(4):
        own.grad = torch.randn(shape, generator=generator)
        theirs.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved, error = (own - first).abs().mean(), (own - theirs).abs().mean()
    assert moved > 4e-3 and error < moved / 50


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.layer(self.embed(tokens))


def batches_at(step, progress):
    generator = torch.Generator().manual_seed(step)
    return [(torch.randint(8, (16,), generator=generator),) for _ in range(2)]


def loss_of(model, batch):
    return (model(batch[0]) - torch.eye(8)[batch[0], :4]).square().mean()


def clock():
    ticks = itertools.count()
    return lambda: float(next(ticks))


def trainer_for(model, folder, budget):
    schedule = Schedule(learning_rate=0.05, warmup_steps=5)
    file = folder / "checkpoint.pt"
    return Trainer(model, schedule, budget, file, save_every=3.0, clock=clock())


def trainer_of(folder, budget):
    return (model := Regression()), trainer_for(model, folder, budget)


class Killed(Exception):
    pass


def killed_at(step):
    def observe(state):
        if state.step == step:
            raise Killed
        return {"step": state.step} if state.step % 4 == 0 else None

    return observe


def test_a_resumed_training_ends_as_one_that_was_not_killed(tmp_path):
    """Killed twice: the steps since the last checkpoint are made again."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, trainer = trainer_of(tmp_path / "whole", Budget(steps=40))
    expected = trainer.run(batches_at, loss_of, killed_at(None))
    for kill in (11, 23, None):
        killed, trainer = trainer_of(tmp_path / "killed", Budget(steps=40))
        began = trainer.state.step
        try:
            state = trainer.run(batches_at, loss_of, killed_at(kill))
        except Killed:
            assert (
                kill - 3 <= trainer_of(tmp_path / "killed", Budget(steps=40))[1].state.step < kill
            )
    assert began > 11
    assert all(
        torch.equal(a, b) for a, b in zip(*map(nn.Module.parameters, (whole, killed)), strict=True)
    )
    assert state.history == expected.history == [{"step": step} for step in range(0, 41, 4)]


def test_what_is_not_trained_stays_and_is_not_kept(tmp_path):
    """A frozen part, such as the encoder that a draft shares, is in no checkpoint."""
    model, _ = trainer_of(tmp_path, Budget(steps=8))
    model.embed.weight.requires_grad_(False)
    before = model.embed.weight.clone()
    file = tmp_path / "checkpoint.pt"
    trainer_for(model, tmp_path, Budget(steps=8)).run(batches_at, loss_of, lambda _state: None)
    assert torch.equal(model.embed.weight, before)
    assert set(torch.load(file, weights_only=True)["model"]) == {"layer.weight", "layer.bias"}
    again, _ = trainer_of(tmp_path / "other", Budget(steps=8))
    again.embed.weight.requires_grad_(False)
    trainer = trainer_for(again, tmp_path, Budget(steps=8))
    assert trainer.state.step == 8
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_the_loss_falls(tmp_path):
    losses = []

    def observe(state):
        losses.extend(state.losses)
        return {}

    _, trainer = trainer_of(tmp_path, Budget(steps=200))
    trainer.run(batches_at, loss_of, observe)
    assert len(losses) == 200 and sum(losses[-20:]) < 0.2 * sum(losses[:20])


def test_a_budget_of_time_counts_that_of_killed_processes(tmp_path):
    """Every look at the clock takes a second: one before the first step and one after each."""
    _, trainer = trainer_of(tmp_path, Budget(seconds=20.0))
    with pytest.raises(Killed):
        trainer.run(batches_at, loss_of, killed_at(11))
    _, trainer = trainer_of(tmp_path, Budget(seconds=20.0))
    assert trainer.state.step == trainer.state.seconds == 9
    state = trainer.run(batches_at, loss_of, killed_at(None))
    assert (state.step, state.seconds, state.progress) == (20, 20.0, 1.0)


def test_a_training_that_is_over_makes_no_step(tmp_path):
    trainer_of(tmp_path, Budget(steps=8))[1].run(batches_at, loss_of, killed_at(None))
    _, trainer = trainer_of(tmp_path, Budget(steps=8))
    state = trainer.run(None, None, killed_at(0))
    assert state.step == 8 and state.history[-1] == {"step": 8}


def test_a_loss_that_is_not_finite_ends_it(tmp_path):
    _, trainer = trainer_of(tmp_path, Budget(steps=8))
    with pytest.raises(ExportError, match="the loss of step 0 is nan; repeat"):
        trainer.run(
            batches_at, lambda model, _: model.layer.weight.sum() * torch.nan, killed_at(None)
        )


FULL_DISK = """
import resource, sys
from pathlib import Path
from dsbd_distill.training import Budget
from tests.distill.test_training import batches_at, killed_at, loss_of, trainer_of

_, trainer = trainer_of(Path(sys.argv[1]), Budget(steps=16))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    trainer.run(batches_at, loss_of, killed_at(None))
except OSError as error:
    print("OSError", error)
"""


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    """A limit on the size of files stands for the disk."""
    _, trainer = trainer_of(tmp_path, Budget(steps=8))
    trainer.run(batches_at, loss_of, killed_at(None))
    program = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("OSError"), (done.stdout, done.stderr)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert trainer_of(tmp_path, Budget(steps=16))[1].state.step == 8


def test_tables_are_not_muons():
    muon, adamw = training.optimizers(Regression(), 1.0)
    sizes = [
        [tuple(p.shape) for group in o.param_groups for p in group["params"]] for o in (muon, adamw)
    ]
    assert sizes == [[(4, 4)], [(8, 4), (4,)]]


COUNTED = np.arange(28).reshape(4, 7) < 25  # the last row ends three places before the others
ROWS = Lesson(
    np.arange(40, dtype=np.uint32).reshape(4, 10),
    np.arange(56, dtype=np.uint32).reshape(4, 7, 2),
    np.full((4, 7, 2), -1.0, np.float32),
    COUNTED,
    tuple(np.full((num, 5), num, np.int16) for num in (9, 9, 9, 6)),
)


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "rows.npz"
    ROWS.write(file)
    read = Lesson.read(file, with_features=True)
    for name in ("tokens", "counted"):
        assert np.array_equal(getattr(read, name), getattr(ROWS, name))
    for name in ("ids", "log_probs"):
        found, wanted = getattr(read, name), getattr(ROWS, name)
        assert np.array_equal(found[COUNTED], wanted[COUNTED]) and not found[~COUNTED].any()
    last = read.at(slice(3, 4))
    assert len(last.tokens) == 1 and last.features[0].tolist() == [[6] * 5] * 6
    assert Lesson.read(file).features is None
    assert Lesson.is_stored(file, with_features=True)
    (tmp_path / "rows.npy").unlink()
    assert not Lesson.is_stored(file, with_features=True)


@pytest.mark.parametrize("damage", [0, 10, 200, "zeros", "other", b"", b"PK", b"\x93NUMPY\x01\x00"])
def test_a_damaged_file_is_named_with_the_fix(damage, tmp_path):
    """Bytes are those of the file of features."""
    file = tmp_path / "held_out.npz"
    ROWS.write(file)
    whole = file.read_bytes()
    if damage == "other":
        with file.open("wb") as opened:
            np.savez(opened, other=np.zeros(3))
    elif isinstance(damage, bytes):
        (tmp_path / "held_out.npy").write_bytes(damage)
    else:
        kept = whole[:60] + bytes(200) + whole[260:] if damage == "zeros" else whole[:damage]
        file.write_bytes(kept)
    name = "npy" if isinstance(damage, bytes) else "npz"
    with pytest.raises(ExportError, match=rf"held_out\.{name} is damaged .*; remove it"):
        Lesson.read(file, with_features=name == "npy")
