"""What a run leaves on the disk, who may go on from it, and what the next start concludes from it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import Dataset

import autoaccum
from autoaccum.errors import (
    AlreadyRunningError,
    ArgumentError,
    ArgumentTypeError,
    AutoaccumWarning,
    CheckpointCorruptError,
    CheckpointLockedError,
    CheckpointStateError,
    CheckpointWriteError,
    ResumeError,
)
from autoaccum.events import Finished, Notice, Replanned, Resumed, Saved, Started, StepReport, StepSkipped, Validated
from autoaccum.runs import checkpoint
from autoaccum.runs import directory as run_directory
from autoaccum.runs.checkpoint import Checkpoints
from autoaccum.runs.directory import Recorded, RunDirectory
from autoaccum.runs.records import RecordWriter
from autoaccum.testing import manual_clock, simulated_memory
from autoaccum.training.trainer import FitResult
from tests.models import classes, mlp, noisy, same, state_of, wide
from tests.processes import in_turn
from tests.runs.machine import Machine, begun

pytestmark = [
    pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and RLIMIT_FSIZE"),
]


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def fit(run_dir: Path | None, **options: Any) -> FitResult:
    """Five windows an epoch."""
    defaults: dict[str, Any] = {
        "model": mlp(),
        "data": classes(40),
        "loss_fn": cross_entropy,
        "effective_batch": 8,
        "micro_batch": 8,
        "optimizer": sgd,
        "epochs": 2,
        "device": "cpu",
        "progress": False,
        "cache": False,
        "run_dir": run_dir,
    }
    if "steps" in options or "samples" in options:
        del defaults["epochs"]
    return autoaccum.fit(**{**defaults, **options})


def end_after(step: int) -> Callable[[Any], None]:
    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == step:
            raise autoaccum.StopTraining

    return end


def files(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and times of change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.inputs, self.targets = classes(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs * self.scale, targets)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.2, steps)


def halving(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


class TestWhoMayGoOn:
    REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # noqa: RUF012
        "type": (
            {"model": mlp(torch.float64), "data": classes(40, torch.float64)},
            "model 0.weight: float32 (16, 8) ->",
        ),
        "frozen": ({"model": frozen()}, "model 0.weight: float32 (16, 8) -> float32 (16, 8) frozen"),
        "loss": ({"loss_fn": Scaled()}, "loss: nothing -> {'class': 'Scaled', 'scale': 'float32 ()'}"),
        "more data": ({"data": classes(48)}, "data samples: 40 -> 48"),
        "other data": ({"data": classes(40, seed=2)}, "data digest: "),
        "other kind": ({"data": Samples()}, "data dataset: nothing -> Samples"),
        "batch": ({"effective_batch": 16}, "effective_batch: 8 -> 16"),
        "schedule": ({"effective_batch": "8, 3:16"}, "effective_batch: 8 -> 8, 3:16"),
        "seed": ({"seed": 1}, "seed: 0 -> 1"),
        "shuffle": ({"shuffle": False}, "shuffle: True -> False"),
        "drop_last": ({"drop_last": True}, "drop_last: False -> True"),
        "clip_norm": ({"clip_norm": 1.0}, "clip_norm: nothing -> 1.0"),
        "precision": ({"precision": "bf16"}, "precision: fp32 -> bf16"),
        "scaling": ({"lr_scaling": "linear", "base_batch": 4}, "lr_scaling: none -> linear"),
        "lr": ({"optimizer": lambda params: sgd(params, lr=0.2)}, "optimizer group 0 lr: 0.1 -> 0.2"),
        "momentum": ({"optimizer": lambda params: sgd(params, momentum=0.5)}, "optimizer group 0 momentum: 0.9 -> 0.5"),
        "optimizer": ({"optimizer": torch.optim.AdamW}, "optimizer class: SGD -> AdamW"),
        "scheduler": ({"lr_scheduler": one_cycle}, "steps of the lr_scheduler: nothing -> 10"),
    }

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_decides_what_is_trained_is_refused_and_shown(self, name: str, tmp_path: Path) -> None:
        fit(tmp_path, callbacks=[end_after(3)])
        before = files(tmp_path)
        options, difference = self.REFUSED[name]
        with pytest.raises(ResumeError) as caught:
            fit(tmp_path, **options)
        assert any(line.startswith(difference) for line in caught.value.differences), caught.value.differences
        assert difference in str(caught.value)
        assert files(tmp_path) == before
        assert fit(tmp_path).num_steps == 10, "the directory was given back"

    def test_a_longer_run_with_a_scheduler(self, tmp_path: Path) -> None:
        fit(tmp_path, lr_scheduler=one_cycle, callbacks=[end_after(3)])
        with pytest.raises(ResumeError, match=r"steps of the lr_scheduler: 10 -> 15"):
            fit(tmp_path, lr_scheduler=one_cycle, epochs=3)

    @pytest.mark.parametrize("as_batches", [False, True])
    def test_data_with_another_number_in_them(self, as_batches: bool, tmp_path: Path) -> None:
        inputs, targets = classes(200)
        other = inputs.clone()
        other[117, 1] += 1
        before, now = ([(x, targets)] if as_batches else (x, targets) for x in (inputs, other))
        fit(tmp_path, data=before, effective_batch=40, callbacks=[end_after(3)])
        with pytest.raises(ResumeError, match="data digest: "):
            fit(tmp_path, data=now, effective_batch=40)

    def test_another_scheduler(self, tmp_path: Path) -> None:
        fit(tmp_path, lr_scheduler=one_cycle, callbacks=[end_after(3)])
        with pytest.raises(ResumeError, match="lr_scheduler: OneCycleLR -> CosineAnnealingLR"):
            fit(tmp_path, lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR)

    ALLOWED: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "micro_batch": {"micro_batch": 3},
        "found": {"micro_batch": "auto", "max_micro_batch": 4, "headroom": 0.1, "memory_limit": 0.9},
        "workers": {"num_workers": 1},
        "cadence": {"checkpoint_every": 2, "keep_checkpoints": 1},
        "validation": {"validation_data": classes(9), "validate_every": 8},
        "noise": {"noise_scale": True, "micro_batch": 4},
    }

    @pytest.mark.parametrize("name", ALLOWED)
    def test_what_decides_only_how_is_allowed(self, name: str, tmp_path: Path) -> None:
        whole = fit(None, data=Samples())
        fit(tmp_path, data=Samples(), callbacks=[end_after(3)])
        result = fit(tmp_path, data=Samples(), **self.ALLOWED[name])
        assert any(isinstance(event, Resumed) and event.step == 3 for event in result.events)
        for one, other in zip(result.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        back = fit(tmp_path, data=Samples(), epochs=3)  # and back again
        assert back.num_steps == 15

    @pytest.mark.parametrize(
        ("shorter", "longer"),
        [({"epochs": 1}, {"epochs": 3}), ({"steps": 7}, {"steps": 12}), ({"steps": 4}, {"epochs": 2})],
    )
    def test_a_larger_budget_goes_on(self, shorter: dict[str, Any], longer: dict[str, Any], tmp_path: Path) -> None:
        whole = state_of(fit(None, model=noisy(), **longer))
        assert not same(state_of(fit(tmp_path, model=noisy(), **shorter)), whole)
        assert same(state_of(fit(tmp_path, model=noisy(), **longer)), whole)

    @pytest.mark.parametrize("smaller", [{"epochs": 1}, {"steps": 3}, {"samples": 9}])
    def test_a_smaller_budget_is_spent(self, smaller: dict[str, Any], tmp_path: Path) -> None:
        expected = state_of(fit(tmp_path))
        assert same(state_of(fit(tmp_path, **smaller)), expected)

    def test_modules_of_other_shapes(self, tmp_path: Path) -> None:
        one, other = mlp(), mlp()
        one.register_buffer("mask", torch.ones(2))
        other.register_buffer("mask", torch.ones(3))
        fit(tmp_path, model=one, loss_fn=Scaled(1), callbacks=[end_after(3)])
        with pytest.raises(ResumeError) as caught:
            fit(tmp_path, model=other, loss_fn=Scaled(3))
        assert caught.value.differences == (
            "model mask: buffer float32 (2,) -> buffer float32 (3,)",
            "loss scale: float32 (1,) -> float32 (3,)",
        )


class TestFinished:
    def test_nothing_is_done_and_that_is_said(self, tmp_path: Path) -> None:
        class Counted(nn.Module):
            calls = 0

            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                Counted.calls += 1
                return self.net(inputs)  # type: ignore[no-any-return]

        options: dict[str, Any] = {"validation_data": classes(9)}
        first = fit(tmp_path, model=Counted(), **options)
        expected, before, calls = state_of(first), files(tmp_path), Counted.calls
        heard: list[Any] = []
        with pytest.warns(AutoaccumWarning, match=r"is finished: it has taken its 10 steps. Nothing is trained"):
            again = fit(tmp_path, model=Counted(), callbacks=[heard.append], **options)
        assert same(state_of(again), expected)
        assert (again.num_steps, again.num_samples, Counted.calls) == (10, 80, calls)
        assert [type(record) for record in heard] == [Started, Resumed, Notice, Finished]
        assert heard[-1].reason == "budget"
        assert files(tmp_path) == before
        assert list(again.history) == list(first.history)
        assert list(again.events) == list(first.events)

    def test_a_validation_that_was_not_reached_is_done(self, tmp_path: Path) -> None:
        class Died(Exception):
            pass

        def die(record: Any) -> None:
            if isinstance(record, Saved) and record.step == 7:
                raise Died

        options: dict[str, Any] = {"steps": 7, "validation_data": classes(9), "checkpoint_every": 1}
        with pytest.raises(Died):
            fit(tmp_path, callbacks=[die], **options)
        result = fit(tmp_path, **options)
        (validated,) = [e for e in result.events if isinstance(e, Validated) and e.step == 7]
        whole = fit(None, **options | {"checkpoint_every": None})
        assert [validated.loss] == [e.loss for e in whole.events if isinstance(e, Validated) and e.step == 7]

    def test_one_that_was_interrupted_in_its_last_window_ends(self, tmp_path: Path) -> None:
        first = fit(tmp_path, steps=4, callbacks=[end_after(4)])
        assert first.events[-1] == Finished(step=4, reason="stopped", stopped_by="end")
        again = fit(tmp_path, steps=4)
        assert again.events[-1] == Finished(step=4, reason="budget")
        assert len(again.history) == 4


class TestAnew:
    def test_false_puts_away_what_is_ours(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("a user's")
        first = state_of(fit(tmp_path, resume=False))
        assert not list(tmp_path.glob("before-*")), "there was nothing"
        whole = files(tmp_path)
        result = fit(tmp_path, resume=False, seed=1, data=Samples())
        assert (result.num_steps, len(result.history)) == (10, 10)
        assert not same(state_of(result), first)
        put_away = files(tmp_path / "before-1")
        del whole["mine.txt"]
        assert put_away == whole
        assert (tmp_path / "mine.txt").exists()
        fit(tmp_path, resume=False)
        assert {path.name for path in tmp_path.glob("before-*")} == {"before-1", "before-2"}
        shutil.rmtree(tmp_path / "before-1")
        fit(tmp_path, resume=False)
        assert {path.name for path in tmp_path.glob("before-*")} == {"before-2", "before-3"}
        assert same(state_of(fit(tmp_path / "before-3")), first), "and can be gone on from"

    def test_auto_begins_where_there_is_nothing(self, tmp_path: Path) -> None:
        place = tmp_path / "a" / "b"
        result = fit(place)
        assert isinstance(result.events[0], Started)
        assert not any(isinstance(event, Resumed) for event in result.events)
        assert {path.name for path in place.iterdir()} == set(run_directory.OURS)


@contextmanager
def held(directory: Path) -> Iterator[int]:
    """Another process writes there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        Checkpoints(directory / "checkpoints")
        os.write(write, b"x")
        time.sleep(3600)  # it is killed long before
        os._exit(0)
    os.read(read, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


@in_turn
class TestTwoProcesses:
    @pytest.mark.parametrize("resume", ["auto", True, False])
    def test_the_second_is_refused_and_changes_nothing(self, resume: Any, tmp_path: Path) -> None:
        fit(tmp_path, callbacks=[end_after(3)])
        with held(tmp_path) as pid:
            before = files(tmp_path)
            with pytest.raises(CheckpointLockedError, match=f"in process {pid}"):
                fit(tmp_path, resume=resume)
            assert files(tmp_path) == before
        assert fit(tmp_path).num_steps == 10, "the kernel gave it back"

    def test_within_one_process(self, tmp_path: Path) -> None:
        caught: list[Exception] = []

        def again(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == 2:
                try:
                    fit(tmp_path)
                except AlreadyRunningError as error:
                    caught.append(error)

        assert fit(tmp_path, callbacks=[again]).num_steps == 10
        assert len(caught) == 1


def tear(directory: Path, keep: int = 0) -> int:
    """Cut the newest checkpoints short, but for so many of the oldest."""
    found, _ = checkpoint.every(directory / "checkpoints")
    torn = found[: len(found) - keep]
    for one in torn:
        path = one.path / checkpoint.STATE
        path.write_bytes(path.read_bytes()[:-1])
    return len(torn)


class TestTorn:
    def test_all(self, tmp_path: Path) -> None:
        fit(tmp_path, checkpoint_every=1, callbacks=[end_after(4)])
        assert tear(tmp_path) == 2
        before = files(tmp_path)
        with pytest.raises(CheckpointCorruptError, match=r"holds no whole checkpoint: .*step-00000004.*bytes"):
            fit(tmp_path)
        assert files(tmp_path) == before
        assert fit(tmp_path, resume=False).num_steps == 10

    @pytest.mark.parametrize("every", [1, 2])
    def test_the_newest(self, every: int, tmp_path: Path) -> None:
        options: dict[str, Any] = {"model": noisy(), "checkpoint_every": every, "keep_checkpoints": 2}
        whole = state_of(fit(None, model=noisy()))
        fit(tmp_path, callbacks=[end_after(5)], **options)
        assert tear(tmp_path, keep=1) == 1
        with pytest.warns(
            AutoaccumWarning, match=r"step-00000005.* bytes, not .* goes on from step-00000004, the newest"
        ):
            result = fit(tmp_path, **options)
        assert same(state_of(result), whole)
        assert [event.step for event in result.events if isinstance(event, Resumed)] == [4]
        again, _ = checkpoint.newest(tmp_path / "checkpoints")
        assert again is not None
        assert again.step == 10

    def test_a_history_without_its_last_line(self, tmp_path: Path) -> None:
        whole = fit(None)
        fit(tmp_path, callbacks=[end_after(5)])
        path = tmp_path / "history.jsonl"
        path.write_bytes(path.read_bytes()[:-30])
        result = fit(tmp_path)
        assert [report.loss for report in result.history] == [report.loss for report in whole.history]


def saved(result: FitResult) -> list[int]:
    return [event.step for event in result.events if isinstance(event, Saved)]


class TestWhen:
    @pytest.mark.parametrize(
        ("every", "expected"), [(1, [*range(1, 11), 10]), (4, [1, 4, 8, 10]), ("epoch", [1, 5, 10]), ("1h", [1, 10])]
    )
    def test_after_the_first_window_the_last_and_as_it_was_asked(
        self, every: Any, expected: list[int], tmp_path: Path
    ) -> None:
        result = fit(tmp_path, checkpoint_every=every)
        assert sorted(set(saved(result))) == sorted(set(expected))

    def test_seconds(self, tmp_path: Path) -> None:
        def tick(record: Any) -> None:
            if isinstance(record, StepReport):
                clock.advance(10)

        with manual_clock() as clock:
            result = fit(tmp_path, checkpoint_every="0.5m", callbacks=[tick])
        assert sorted(set(saved(result))) == [1, 4, 7, 10]

    @pytest.mark.parametrize("keep", [1, 3])
    def test_so_many_are_kept(self, keep: int, tmp_path: Path) -> None:
        fit(tmp_path, checkpoint_every=1, keep_checkpoints=keep)
        found, _ = checkpoint.every(tmp_path / "checkpoints")
        assert [one.step for one in found] == list(range(10, 10 - keep, -1))


class TestMemory:
    def test_a_checkpoint_takes_none_of_what_windows_have(self, tmp_path: Path) -> None:
        """On a CPU a copy of all state would lie in the memory that is planned for, and it would not fit."""

        def run(run_dir: Path | None) -> FitResult:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
            num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
            with simulated_memory(6 * num_bytes):
                every: dict[str, Any] = {} if run_dir is None else {"checkpoint_every": 1}
                # A measurement lays state aside, for which there is no room here either.
                return fit(run_dir, model=model, optimizer=torch.optim.AdamW, micro_batch=4, verify=False, **every)

        alone, kept = run(None), run(tmp_path)
        assert [report.replays for report in kept.history] == [0] * 10
        peaks = [[report.peak_bytes or 0 for report in result.history] for result in (kept, alone)]
        # The first checkpoint is tried, and what the step before it has taken is not added to the window after it.
        assert peaks[0][1] <= peaks[1][1]
        assert peaks[0][:1] + peaks[0][2:] == peaks[1][:1] + peaks[1][2:]


class TestWhereItIs:
    def test_a_callback_may_change_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)

        def go_away(record: Any) -> None:
            if isinstance(record, StepReport):
                os.chdir(tmp_path / "elsewhere")

        result = fit(Path("run"), callbacks=[go_away], checkpoint_every=2)
        assert len(result.history) == 10
        assert list((tmp_path / "elsewhere").iterdir()) == []
        found, _ = checkpoint.newest(tmp_path / "run/checkpoints")
        assert found is not None
        assert found.step == 10

    @pytest.mark.parametrize("every", [0, "", False])
    def test_nothing_is_no_cadence(self, every: Any, tmp_path: Path) -> None:
        with pytest.raises((ArgumentError, ArgumentTypeError), match="checkpoint_every="):
            fit(tmp_path, checkpoint_every=every)


class Opaque:
    """A factor that a checkpoint cannot hold."""

    def __init__(self) -> None:
        self.compiled = object()

    def __call__(self, step: int) -> float:
        return 1.0


class TestWhatCannotBeWritten:
    def test_a_state_that_cannot_be_kept_is_told_after_the_first_window(self, tmp_path: Path) -> None:
        reports: list[Any] = []
        with pytest.raises(
            CheckpointStateError, match=r"learning_rate\.scheduler\.lr_lambdas\[0\]\.compiled"
        ) as caught:
            fit(tmp_path, lr_scheduler=lambda o, n: LambdaLR(o, Opaque()), callbacks=[reports.append])
        assert "which a checkpoint cannot hold" in str(caught.value)
        assert [r.step for r in reports if isinstance(r, StepReport)] == [1]
        assert fit(tmp_path, lr_scheduler=halving).num_steps == 10, "the directory was given back"

    @pytest.mark.parametrize(
        ("every", "kind", "what"), [(1, Saved, "checkpoints/step-0000000[34]"), ("1h", StepReport, "history.jsonl")]
    )
    @in_turn
    def test_a_full_disk_in_mid_run(self, every: Any, kind: type, what: str, tmp_path: Path) -> None:
        whole = state_of(fit(None))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill(record: Any) -> None:
            if isinstance(record, kind) and record.step == (3 if every == 1 else 2):
                while not list((tmp_path / "checkpoints").glob("step-*")):
                    time.sleep(0.001)
                there = (tmp_path / "history.jsonl").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (there + 1000 if every == 1 else there + 10, hard))

        try:
            with pytest.raises(CheckpointWriteError, match=f"{what}: File too large"):
                fit(tmp_path, checkpoint_every=every, callbacks=[fill])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        found, skipped = checkpoint.newest(tmp_path / "checkpoints")
        assert found is not None
        assert found.step in ((2, 3) if every == 1 else (1,))
        assert skipped == ()
        assert same(state_of(fit(tmp_path)), whole)

    @pytest.mark.parametrize("where", ["a file", "below a file", "history"])
    def test_a_place_that_cannot_be_written_to(self, where: str, tmp_path: Path) -> None:
        place = tmp_path / "there"
        if where == "history":
            (place / "history.jsonl").mkdir(parents=True)
        else:
            place.write_text("")
            place = place / "below" if where == "below a file" else place
        for _ in range(2):  # the second time too, for nothing holds it
            with pytest.raises(CheckpointWriteError, match=r"there.*[^B]\. .*Choose a directory that can be") as raised:
                fit(place)
            assert ("The checkpoints before it are whole" in str(raised.value)) == (where == "history")


class TestRecorded:
    def test_what_a_resume_made_void_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "history.jsonl"
        write = RecordWriter(path)

        def report(step: int, loss: float) -> StepReport:
            return StepReport(
                step=step,
                epoch=0,
                num_samples=step,
                effective_batch=1,
                micro_batches=(1,),
                loss=loss,
                lr=0.1,
                grad_norm=None,
                seconds=0.1,
                peak_bytes=1,
                limit_bytes=2,
                replays=0,
            )

        def start() -> Started:
            return Started(num_steps=9, num_samples=9, device="cpu", limit_bytes=1, used_bytes=1)

        def skip(step: int, reason: str) -> StepSkipped:
            return StepSkipped(step=step, reason=reason)

        reports, events = Recorded(path, StepReport), Recorded(path, Started, StepSkipped, Resumed, Finished)
        assert (list(reports), list(events)) == ([], [])
        first = [start(), report(1, 0.1), skip(2, "a"), report(2, 0.2)]  # killed before its first checkpoint
        second = [start(), skip(1, "b"), report(1, 1.1), report(2, 1.2), skip(3, "c"), report(3, 1.3)]
        third = [start(), Resumed(step=2, num_samples=2, checkpoint="x"), report(3, 2.3), skip(4, "d")]
        for record in (*first, *second, *third):
            write(record)
        write.close()
        assert [(r.step, r.loss) for r in reports] == [(1, 1.1), (2, 1.2), (3, 2.3)]
        assert [(e.step, e.reason) for e in events if isinstance(e, StepSkipped)] == [(1, "b"), (4, "d")]
        assert [type(e) for e in events].count(Started) == 3
        assert reports[-1] == report(3, 2.3)
        assert reports[:2] == [report(1, 1.1), report(2, 1.2)]

    def test_it_is_read_again_only_when_there_is_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        result = fit(tmp_path)
        assert len(result.history) == 10
        monkeypatch.setattr(run_directory, "read_records", None)
        assert len(result.history) == 10
        assert result.history[3].step == 4


class TestKilledByTheKernel:
    @staticmethod
    def die(directory: Path, machine: Machine, micro_batch: int) -> None:
        """As the last process left it, but for the mark."""
        begun(directory).enter(micro_batch, 1)
        machine.kills(99)

    @staticmethod
    def said(result: FitResult) -> list[Replanned]:
        return [e for e in result.events if isinstance(e, Replanned) and "the kernel killed" in e.reason]

    def test_a_smaller_plan_and_a_word(self, tmp_path: Path, machine: Machine) -> None:
        fit(tmp_path / "run", callbacks=[end_after(3)])
        self.die(tmp_path / "run", machine, 8)
        result = fit(tmp_path / "run")
        (said,) = self.said(result)
        assert (said.step, said.old, said.new) == (4, (8,), (4, 4))
        assert [r.micro_batches for r in result.history] == [(8,)] * 3 + [(4, 4)] * 7
        again = fit(tmp_path / "run", epochs=3)
        assert len(self.said(again)) == 1, "once"

    def test_before_the_first_checkpoint(self, tmp_path: Path, machine: Machine) -> None:
        (tmp_path / "run").mkdir()
        self.die(tmp_path / "run", machine, 8)
        result = fit(tmp_path / "run")
        assert [said.new for said in self.said(result)] == [(4, 4)]
        assert result.history[0].micro_batches == (4, 4)

    def test_a_search_stays_below(self, tmp_path: Path, machine: Machine) -> None:
        (tmp_path / "run").mkdir()
        self.die(tmp_path / "run", machine, 16)
        result = fit(tmp_path / "run", micro_batch="auto", data=classes(400), effective_batch=100)
        (said,) = self.said(result)
        assert max(said.old) <= 16
        assert max(said.new) < max(said.old)
        assert max(size for r in result.history for size in r.micro_batches) < 16

    def test_recorded_plans_give_way(self, tmp_path: Path, machine: Machine) -> None:
        plans = [(8,)] * 10
        fit(tmp_path / "run", micro_batch=plans, callbacks=[end_after(3)])
        self.die(tmp_path / "run", machine, 8)
        result = fit(tmp_path / "run", micro_batch=plans)
        assert [r.micro_batches for r in result.history[3:]] == [(4, 4)] * 7

    def test_where_none_is_smaller_that_is_said(self, tmp_path: Path, machine: Machine) -> None:
        fit(tmp_path / "run", micro_batch=1, callbacks=[end_after(3)])
        self.die(tmp_path / "run", machine, 1)
        with pytest.warns(AutoaccumWarning, match=r"killed the last process .* None is smaller"):
            result = fit(tmp_path / "run", micro_batch=1)
        assert result.num_steps == 10
        assert self.said(result) == []

    def test_another_sigkill_changes_nothing(self, tmp_path: Path, machine: Machine) -> None:
        fit(tmp_path / "run", callbacks=[end_after(3)])
        begun(tmp_path / "run").enter(8, 1)
        result = fit(tmp_path / "run")
        assert self.said(result) == []
        assert {r.micro_batches for r in result.history} == {(8,)}

    def test_the_mark_names_at_least_what_is_being_run(self, tmp_path: Path) -> None:
        """Trials too, which are larger than the plan. (Two micro-batches are measured joined where no kernel kills.)"""
        place = tmp_path / "run"
        ran: list[tuple[int, int]] = []

        class Looking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = wide()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                is_inside, micro_batch, _ = struct.unpack("<3q", (place / "window").read_bytes())
                ran.append((len(inputs), is_inside * micro_batch))
                return self.net(inputs)  # type: ignore[no-any-return]

        with simulated_memory("800KiB"):
            fit(place, model=Looking(), data=classes(240), effective_batch=60, micro_batch="auto", verify=False)
        assert len({size for size, _ in ran}) > 3
        assert [(size, marked) for size, marked in ran if marked < size] == []
        assert (place / "window").read_bytes() == bytes(24)


def test_config_and_environment(tmp_path: Path) -> None:
    fit(tmp_path, clip_norm=1.0, lr_scheduler=one_cycle)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model"], config["effective_batch"], config["clip_norm"]) == ("Sequential", 8, 1.0)
    assert (config["loss_fn"], config["lr_scheduler"]) == ("cross_entropy", "one_cycle")
    assert config["trained"]["model"]["0.weight"] == "float32 (16, 8)"
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__


def test_is_due(tmp_path: Path) -> None:
    config = {"trained": {}}
    directory = RunDirectory(tmp_path, keep=1, cadence=("steps", 5), config=config, anew=False)
    assert directory.is_due(1), "the first, so that what cannot be written is told early"
    directory.save(1, {}, {}, {}, is_best=False)
    assert [step for step in range(1, 11) if directory.is_due(step)] == [5, 10]
    directory.close()
    directory = RunDirectory(tmp_path, keep=1, cadence=("steps", 5), config=config, anew=False)
    assert directory.resume(lambda *found: None) is not None
    assert [step for step in range(1, 11) if directory.is_due(step)] == [5, 10], "the first was that of the first run"
    directory.close()


def test_a_link_in_the_place_of_a_file_that_is_yet_to_be_renamed(tmp_path: Path) -> None:
    """Its name can be foreseen."""
    mine = tmp_path / "mine"
    mine.write_text("dear to me")
    (tmp_path / "run").mkdir()
    for name in ("config.json", "environment.json", "kills.json"):
        (tmp_path / "run" / f"{name}.{os.getpid()}.tmp").symlink_to(mine)
    fit(tmp_path / "run")
    assert mine.read_text() == "dear to me"


def test_the_lock_is_given_back_when_the_directory_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(5, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "sync_directory", fails)
        with pytest.raises(CheckpointWriteError, match="the disk is broken"):
            checkpoint.Checkpoints(tmp_path / "checkpoints")
    checkpoint.Checkpoints(tmp_path / "checkpoints").close()
