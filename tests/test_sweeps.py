"""Sweeps: the same data for every trial, one memory model for all, nothing lost when a process is killed."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from autoaccum.cli import main
from autoaccum.errors import ArgumentError, ConflictingArgumentsError, RecipeResultError, ResumeError
from autoaccum.events import Resumed, Started, StepReport
from autoaccum.reporting.records import HISTORY, read_records
from autoaccum.sweeps import sweep
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp

forks = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
Recipe = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """What other tests have left is not looked through after each trial."""
    gc.freeze()
    yield
    gc.unfreeze()


class Broad(nn.Module):
    """A few weights, and activations of 2 KiB a sample: in the first operation, and in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("grid", torch.linspace(0.5, 1.5, 32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.layer(inputs).unsqueeze(-1) * self.grid).tanh().mean(-1))
        return out


MANY = classes(512)


def broad() -> dict[str, Any]:
    return small() | {"model": Broad(), "data": MANY}


def small() -> dict[str, Any]:
    return {
        "model": nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        "data": classes(128),
        "validation_data": classes(32, seed=2),
        "loss_fn": nn.functional.cross_entropy,
        "device": "cpu",
    }


def run(recipe: Any, directory: Path, **settings: Any) -> optuna.Study:
    """A sweep without a bar, over what tests have no wish to vary."""
    defaults: dict[str, Any] = {"lr": (1e-3, 1e-1), "effective_batch": [16, 32], "num_trials": 3, "progress": False}
    return sweep(recipe, directory=directory, **{**defaults, **settings})


def pruner() -> optuna.pruners.BasePruner:
    return optuna.pruners.NopPruner()


def outcomes(study: optuna.Study) -> list[tuple[str, Any, Any]]:
    return [(trial.state.name, trial.params, trial.values) for trial in study.trials]


# What is searched.


@pytest.mark.parametrize(
    ("effective_batch", "distribution"),
    [
        ("16:64", optuna.distributions.CategoricalDistribution([16, 32, 64])),
        ((16, 64), optuna.distributions.CategoricalDistribution([16, 32, 64])),
        ("48,16", optuna.distributions.CategoricalDistribution([48, 16])),
        ([48, 16], optuna.distributions.CategoricalDistribution([48, 16])),
        ((16, 48), optuna.distributions.IntDistribution(16, 48, log=True)),
    ],
)
def test_the_search_space(effective_batch: Any, distribution: Any, tmp_path: Path) -> None:
    study = run(small, tmp_path, lr="1e-3:1e-1", effective_batch=effective_batch, num_trials=1)
    assert study.trials[0].distributions == {
        "lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True),
        "effective_batch": distribution,
    }
    (first, *_) = read(tmp_path, 0, StepReport)
    assert first.effective_batch == study.trials[0].params["effective_batch"]
    assert first.lr == study.trials[0].params["lr"]


def test_a_grid_is_gone_through(tmp_path: Path) -> None:
    grid: dict[str, Any] = {"lr": [1e-3, 1e-2], "effective_batch": [16, 32]}
    study = run(small, tmp_path, sampler=lambda seed: optuna.samplers.GridSampler(grid), num_trials=4, pruner=pruner())
    assert sorted(tuple(trial.params.values()) for trial in study.trials) == [
        (lr, batch) for lr in grid["lr"] for batch in grid["effective_batch"]
    ]


def test_a_number_is_taken_by_all_trials(tmp_path: Path) -> None:
    study = run(small, tmp_path, lr=0.25, effective_batch="16,32", num_trials=2, seed=3)
    assert [set(trial.params) for trial in study.trials] == [{"effective_batch"}] * 2
    assert {report.lr for number in (0, 1) for report in read(tmp_path, number, StepReport)} == {0.25}


def test_what_the_recipe_takes_goes_to_it_and_the_rest_to_fit(tmp_path: Path) -> None:
    seen = []

    def recipe(lr: float, width: int) -> dict[str, Any]:
        seen.append(width)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        return small() | {"model": model, "optimizer": lambda params: torch.optim.SGD(params, lr=lr)}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 4, 6), "clip_norm": trial.suggest_float("clip_norm", 1, 2)}

    study = run(recipe, tmp_path, search_space=space, num_trials=2)
    for trial in study.trials:
        report = read(tmp_path, trial.number, StepReport)[0]
        assert report.lr == trial.params["lr"]
        assert report.grad_norm is not None, "clip_norm went to fit"
    assert seen[1:] == [trial.params["width"] for trial in study.trials], "the first was to check"


def test_lr_that_a_recipe_takes_and_makes_nothing_of_goes_to_fit_too(tmp_path: Path) -> None:
    def recipe(lr: float) -> dict[str, Any]:
        return small()

    study = run(recipe, tmp_path, num_trials=1)
    assert read(tmp_path, 0, StepReport)[0].lr == study.trials[0].params["lr"]


def test_every_trial_gets_the_same_samples_and_its_own_seed(tmp_path: Path) -> None:
    study = run(small, tmp_path, samples=96, seed=5, pruner=pruner())
    assert [trial.user_attrs["num_samples"] for trial in study.trials] == [96] * 3
    assert [trial.user_attrs["seed"] for trial in study.trials] == [5, 6, 7]
    assert [trial.user_attrs["num_steps"] for trial in study.trials] == [
        96 // trial.params["effective_batch"] for trial in study.trials
    ]


def test_the_budget_may_be_in_the_recipes_epochs(tmp_path: Path) -> None:
    study = run(small, tmp_path, epochs=2, num_trials=1)
    assert study.trials[0].user_attrs["num_samples"] == 256


def test_the_value_is_the_last_validation_loss(tmp_path: Path) -> None:
    study = run(small, tmp_path, num_trials=1)
    (trial,) = study.trials
    assert trial.last_step == 128
    assert trial.value == trial.intermediate_values[128]


def test_the_same_seed_is_the_same_study_and_another_is_another(tmp_path: Path) -> None:
    """The model's weights are drawn after the seed is set, and the sampler's draws are each trial's own."""
    first = outcomes(run(small, tmp_path / "a", micro_batch=8, num_trials=2))
    assert first == outcomes(run(small, tmp_path / "b", micro_batch=8, num_trials=2))
    assert first != outcomes(run(small, tmp_path / "c", micro_batch=8, num_trials=2, seed=1))
    assert len({params["lr"] for _, params, _ in first}) == 2


# Memory.


def test_twenty_trials_where_no_effective_batch_fits_at_once(tmp_path: Path) -> None:
    limit = 100_000
    inputs, targets = classes(64)
    with simulated_memory(limit), pytest.raises(torch.OutOfMemoryError):
        nn.functional.cross_entropy(Broad()(inputs), targets).backward()
    with simulated_memory(limit):
        study = run(broad, tmp_path, effective_batch=[64, 128, 256], num_trials=20, samples=512)
    assert len(study.trials) == 20
    assert {trial.state for trial in study.trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert not any("not_fitting" in trial.user_attrs for trial in study.trials)
    first, *rest = (trial.user_attrs for trial in study.trials)
    # Each looks once at what it was told; what more they try is together no more than what the first did.
    assert sum(found["search_trials"] - 1 for found in rest) <= first["search_trials"]
    assert first["ooms"] + sum(found["ooms"] for found in rest) <= 1


def test_a_tight_limit_changes_no_value(tmp_path: Path) -> None:
    found = []
    for limit, micro_batch in ((70_000, "auto"), (1_000_000, 128)):
        settings = {"num_trials": 5, "effective_batch": [64, 128], "samples": 256, "micro_batch": micro_batch}
        with simulated_memory(limit):
            found.append(run(broad, tmp_path / str(limit), pruner=pruner(), **settings).trials)
    tight, loose = found
    assert [trial.params for trial in tight] == [trial.params for trial in loose]
    assert [trial.value for trial in tight] == pytest.approx([trial.value for trial in loose], rel=1e-5)
    assert max(max(trial.user_attrs["micro_batches"]) for trial in tight) < 32
    assert min(max(trial.user_attrs["micro_batches"]) for trial in loose) >= 64


def test_what_does_not_fit_is_pruned_with_its_numbers(tmp_path: Path) -> None:
    def recipe(width: int) -> dict[str, Any]:
        return small() | {"model": nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": 16 if trial.number else 16 + trial.suggest_categorical("width", [20_000])}

    with simulated_memory(1_000_000):
        study = run(recipe, tmp_path, search_space=space, num_trials=2, samples=64)
    pruned, complete = study.trials
    assert (pruned.state, complete.state) == (TrialState.PRUNED, TrialState.COMPLETE)
    assert pruned.user_attrs["not_fitting"]["limit_bytes"] <= 1_000_000
    assert pruned.user_attrs["not_fitting"]["peak_bytes"] > 900_000


# Pruning.


class Spy(optuna.pruners.BasePruner):
    """Prunes trials of a small learning rate after half of the samples; remembers what it was asked."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        assert trial.last_step is not None
        self.steps.append((trial.params["effective_batch"], trial.last_step))
        return trial.params["effective_batch"] == 32 and trial.last_step >= 64


def test_pruning_is_by_samples(tmp_path: Path) -> None:
    """Windows end at other samples than validations are due at, and pruners compare trials at equal steps."""
    spy = Spy()
    study = run(small, tmp_path, effective_batch=[24, 32], num_trials=4, samples=128, validate_every=32, pruner=spy)
    assert {trial.params["effective_batch"] for trial in study.trials} == {24, 32}
    for trial in study.trials:
        if trial.params["effective_batch"] == 32:
            assert trial.state == TrialState.PRUNED
            assert list(trial.intermediate_values) == [32, 64]
            assert trial.user_attrs["num_samples"] == 64
            assert not (tmp_path / f"trial-{trial.number:04d}" / "checkpoints").exists()
        else:
            assert trial.state == TrialState.COMPLETE
            assert list(trial.intermediate_values) == [32, 64, 96, 128], "of windows that end at 48, 72, 96 and 128"
    assert (24, 128) not in spy.steps, "a trial at its end is complete"


def test_nothing_is_pruned_in_the_first_third_unless_one_asks_for_it(tmp_path: Path) -> None:
    study = run(small, tmp_path, lr=(1e-5, 10.0), effective_batch=16, num_trials=10, micro_batch=16)
    ends = [trial.last_step or 0 for trial in study.trials if trial.state == TrialState.PRUNED]
    assert min(ends) == 48, "16 times 3, which is a third of 128 and a little more"


def test_a_loss_that_is_not_finite_is_pruned_and_is_no_failure(tmp_path: Path) -> None:
    def recipe(lr: float) -> dict[str, Any]:
        return small() | {"optimizer": lambda params: torch.optim.SGD(params, lr=1e38)}

    study = run(recipe, tmp_path, num_trials=1)
    assert study.trials[0].state == TrialState.PRUNED
    assert study.trials[0].user_attrs["diverged"]


def test_a_first_loss_that_is_not_finite_is_pruned_too(tmp_path: Path) -> None:
    def recipe(scale: float) -> dict[str, Any]:
        return small() | {"loss_fn": lambda outputs, targets: nn.functional.cross_entropy(outputs * scale, targets)}

    space = {"scale": [float("inf"), 1.0]}
    study = run(
        recipe,
        tmp_path,
        lr=0.01,
        effective_batch=16,
        num_trials=2,
        search_space=lambda trial: {"scale": trial.suggest_categorical("scale", space["scale"])},
        sampler=optuna.samplers.GridSampler(space, seed=0),
    )
    ends = {trial.params["scale"]: (trial.state, trial.user_attrs.get("diverged")) for trial in study.trials}
    assert ends == {float("inf"): (TrialState.PRUNED, True), 1.0: (TrialState.COMPLETE, None)}


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"samples": trial.suggest_categorical("samples", [32, 64, 96])}

    study = run(small, tmp_path, metric=("validation_loss", "samples"), search_space=space, num_trials=4)
    for trial in study.trials:
        assert trial.values[1] == trial.params["samples"] == trial.user_attrs["num_samples"]
    least = min(trial.values[1] for trial in study.trials)
    assert least in [trial.values[1] for trial in study.best_trials]
    timed = run(small, tmp_path / "timed", metric="validation_loss,seconds", num_trials=1).trials[0]
    assert timed.values[1] == timed.user_attrs["seconds"] > 0


# Processes.


def child(work: Callable[[], object]) -> int:
    """A process that does it; 0 is its exit code then."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read(directory: Path, number: int, *kinds: type) -> list[Any]:
    return [r for r in read_records(directory / f"trial-{number:04d}" / HISTORY) if isinstance(r, kinds)]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@forks
def test_killed_four_times_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """In a recipe, in two windows, and when a trial was about to be told of: the values are the same to the bit."""
    settings = {"micro_batch": 8, "num_trials": 4, "checkpoint_every": 1, "study_name": "killed"}
    expected = outcomes(run(small, tmp_path / "whole", **settings))
    directory = tmp_path / "killed"

    def in_recipe() -> None:
        calls = []

        def recipe() -> dict[str, Any]:
            calls.append(None)
            return small() if len(calls) < 2 else die()  # type: ignore[return-value, func-returns-value]

        run(recipe, directory, **settings)

    def after(windows: int) -> Callable[[], object]:
        seen = []

        def callback(record: object) -> None:
            seen.extend([record] if isinstance(record, StepReport) else [])
            if len(seen) == windows:
                die()

        return lambda: run(small, directory, callbacks=[callback], **settings)

    def in_tell() -> None:
        optuna.Study.tell = die  # type: ignore[method-assign, assignment]
        run(small, directory, **settings)

    for work in (in_recipe, after(3), in_tell, after(11)):
        assert ended(child(work)) == -signal.SIGKILL
    assert outcomes(run(small, directory, **settings)) == expected
    assert [trial.user_attrs["num_samples"] for trial in run(small, directory, **settings).trials] == [128] * 4
    resumed = [record for number in range(4) for record in read(directory, number, Resumed)]
    assert len(resumed) == 2, "those that were killed in a window went on from their checkpoints, one was finished"
    assert all(record.step >= 1 for record in resumed)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """The URL of a server of our own, on a socket in a directory of its own."""
    pytest.importorskip("psycopg", reason="needs psycopg to speak to PostgreSQL")
    programs = [shutil.which(name) for name in ("initdb", "postgres")]
    if None in programs:
        pytest.skip("needs PostgreSQL: initdb and postgres are not on the path")
    initdb, postgres = map(str, programs)
    user: dict[str, Any] = {"user": "postgres"} if os.getuid() == 0 else {}  # it does not run as root
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if user:
            shutil.chown(folder, "postgres")
        data = str(folder / "data")
        made = [initdb, "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, cwd=folder, **user)
        server = subprocess.Popen(
            [postgres, "-D", data, "-k", name, "-c", "listen_addresses=", "-F"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **user,
        )
        try:
            while not (folder / ".s.PGSQL.5432").exists():
                assert server.poll() is None, "it has not come up"
                time.sleep(0.05)
            yield f"postgresql+psycopg://postgres@/postgres?host={name}"
        finally:
            server.send_signal(signal.SIGINT)  # "fast": it does not wait for clients
            server.wait()


def share(directories: list[Path], **settings: Any) -> None:
    """Two processes on one study: no trial is lost, and none is run twice."""
    settings = {"num_trials": 6, "pruner": pruner(), **settings}
    pids = [child(partial(run, small, directory, **settings)) for directory in directories]
    assert [ended(pid) for pid in pids] == [0, 0]
    storage = optuna.storages.RDBStorage(settings.get("storage") or f"sqlite:///{directories[0]}/study.db")
    study = optuna.load_study(storage=storage, study_name="small")
    states = [trial.state for trial in study.trials if trial.state != TrialState.FAIL]
    assert states == [TrialState.COMPLETE] * 6
    for trial in study.trials:
        if trial.state == TrialState.COMPLETE:
            started = [
                record
                for directory in set(directories)
                if (directory / f"trial-{trial.number:04d}" / HISTORY).exists()
                for record in read(directory, trial.number, Started)
            ]
            assert len(started) == 1
    assert len({trial.params["lr"] for trial in study.trials if trial.params}) == 6, "they draw different trials"
    if len(set(directories)) == 1:
        assert len(study.trials) == 6
    optuna.delete_study(storage=storage, study_name="small")
    storage.engine.dispose()


@forks
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    share([tmp_path] * 2)


@forks
@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
@pytest.mark.filterwarnings("ignore:Trials .* are run in other directories")
def test_two_processes_share_a_study_on_postgresql(names: tuple[str, str], tmp_path: Path, postgresql: str) -> None:
    """In one directory as on one machine, and in two."""
    share([tmp_path / name for name in names], storage=postgresql)


@forks
def test_ctrl_c_leaves_the_trial_to_be_gone_on_with(tmp_path: Path) -> None:
    seen = []

    def interrupt(record: object) -> None:
        if isinstance(record, StepReport):
            seen.append(record)
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

    settings = {"micro_batch": 8, "num_trials": 2}
    stopped = run(small, tmp_path, callbacks=[interrupt], **settings)
    assert [trial.state for trial in stopped.trials] == [TrialState.RUNNING]
    assert len(seen) == 2
    study = run(small, tmp_path, **settings)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert [record.step for record in read(tmp_path, 0, Resumed)] == [2]


def test_a_process_whose_parent_is_gone_leaves_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent:
        asked = 0

        def is_alive(self) -> bool:
            self.asked += 1
            return self.asked < 4  # before the trial, and after each of its windows

    monkeypatch.setattr("autoaccum.sweeps._parent", Parent())
    study = run(small, tmp_path)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING]
    assert len(read(tmp_path, 0, StepReport)) == 3
    monkeypatch.undo()
    assert len(run(small, tmp_path).trials) == 3
    assert [record.step for record in read(tmp_path, 0, Resumed)] == [3]


def test_more_trials_of_the_same_study(tmp_path: Path) -> None:
    first = outcomes(run(small, tmp_path, num_trials=2, micro_batch=8))
    both = outcomes(run(small, tmp_path, num_trials=3, micro_batch=8))
    assert both[:2] == first
    assert both == outcomes(run(small, tmp_path / "at once", num_trials=3, micro_batch=8))


@pytest.mark.parametrize("storage", ["journal:{0}/study.journal", "{0}/study.log", "sqlite:///{0}/other.db"])
def test_storages(storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    for num_trials in (1, 2):
        study = run(small, directory, storage=storage.format(tmp_path), num_trials=num_trials)
    assert len(study.trials) == 2
    assert not (directory / "study.db").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_trial_that_fails_is_not_counted(tmp_path: Path) -> None:
    calls = []

    def recipe() -> dict[str, Any]:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("a bug")
        return small()

    with pytest.raises(RuntimeError, match="a bug"):
        run(recipe, tmp_path, num_trials=2)
    study = run(recipe, tmp_path, num_trials=2)
    states = [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert [trial.state for trial in study.trials] == states


def test_trials_that_a_user_queues_come_first(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=storage, study_name="small")
    study.enqueue_trial({"lr": 0.05, "effective_batch": 32})
    found = run(small, tmp_path / "runs", storage=storage, num_trials=2)
    assert found.trials[0].params == {"lr": 0.05, "effective_batch": 32}
    assert [trial.state for trial in found.trials] == [TrialState.COMPLETE] * 2


# Errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": (1e-2, 1e-3)}, "lr=(0.01, 0.001): expected (low, high)"),
        ({"lr": "1e-3:x"}, "lr='1e-3:x': expected"),
        ({"lr": (1e-3, 1e-2, 1e-1)}, "expected (low, high)"),
        ({"lr": -1.0}, "lr=-1.0: expected a number above 0"),
        ({"effective_batch": [16, 16]}, "effective_batch=[16, 16]: expected"),
        ({"effective_batch": "64:32"}, "effective_batch='64:32': expected"),
        ({"effective_batch": "64:"}, "effective_batch='64:': expected"),
        ({"effective_batch": [16, 0]}, "effective_batch=0: expected an int of at least 1"),
        ({"metric": "accuracy"}, "metric='accuracy': expected one of 'validation_loss', 'seconds', 'samples'"),
        ({"storage": "study.db"}, "For a SQLite file write 'sqlite:///study.db'"),
        ({"num_trials": 0}, "num_trials=0: expected an int of at least 1"),
        ({"jobs": 0}, "jobs=0: expected an int of at least 1"),
        ({"run_dir": "runs"}, "run_dir='runs': expected arguments of sweep, or of fit"),
        ({"lr": 0.1, "effective_batch": 16}, "Pass (low, high), or search_space."),
        ({"effective_batch": None}, "effective_batch=None: expected samples to choose from"),
        ({"search_space": lambda trial: {"width": 3}}, "Write 'def recipe(width): ...' and use it there."),
        ({"optimizer": torch.optim.SGD}, "Write 'def recipe(lr): ...' and make the optimizer with it."),
        ({"validation_data": None}, "validation_data=None: expected data by whose loss trials are compared"),
        ({"recipe": {}}, "recipe={}: expected a function that returns the arguments of fit"),
        ({"recipe": lambda width: small()}, "width=None: expected a value, as the recipe takes it"),
        ({"search_space": {}}, "search_space={}: expected a function of the trial"),
        ({"search_space": lambda trial: None}, "search_space=None: expected a function that returns a dict"),
        ({"search_space": lambda trial: {"lr": 0.1}}, "lr=0.1: expected at most one of lr and search_space"),
        ({"search_space": lambda trial: {"samples": 9}}, "samples=9: expected the same for all trials"),
        ({"search_space": lambda trial: {"seed": 9}}, "seed=9: expected the same for all trials"),
        ({"sampler": optuna.samplers.TPESampler}, "expected a sampler of Optuna, or a function (seed) -> sampler"),
        ({"pruner": optuna.pruners.NopPruner}, "expected a pruner of Optuna"),
        ({"metric": ("seconds", "seconds")}, "expected one or more of validation_loss, seconds, samples, each once"),
        ({"metric": 3}, "metric=3: expected one or more of"),
        ({"study_name": 3}, "study_name=3: expected a text"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0: expected a number above 0"),
        ({"epochs": -1}, "epochs=-1: expected an int of at least 1"),
        ({"validate_every": 0}, "validate_every=0: expected an int of at least 1"),
    ],
)
def test_arguments_that_cannot_be_used(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as raised:
        run(**{"recipe": small, "directory": tmp_path / "runs", **settings})
    assert message in str(raised.value)
    assert not (tmp_path / "runs").exists() or "storage" in settings


def test_a_budget_in_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConflictingArgumentsError, match="a step is more samples where the effective batch is larger"):
        run(small, tmp_path, steps=5)


def test_data_without_a_length_needs_a_budget(tmp_path: Path) -> None:
    def recipe() -> dict[str, Any]:
        inputs, targets = classes(64)
        return small() | {"data": ((inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 64, 16))}

    with pytest.raises(ArgumentError, match="samples=None: expected a budget, as the data has no length"):
        run(recipe, tmp_path)


def test_a_recipe_that_returns_something_else(tmp_path: Path) -> None:
    with pytest.raises(RecipeResultError, match="mlp returned Sequential, expected a dict"):
        run(mlp, tmp_path)


def test_settings_that_would_make_trials_incomparable_are_refused(tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    for changed in ({"samples": 64}, {"metric": "seconds"}):
        with pytest.raises(ArgumentError, match="as study 'small' has it. Trials of one study are compared by it"):
            run(small, tmp_path, num_trials=2, **changed)


@pytest.mark.parametrize("changed", [[16, 64], (16, 48)])
def test_what_optuna_cannot_change_within_a_study_is_refused_before_a_trial(changed: Any, tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    with pytest.raises(ArgumentError, match=r"effective_batch=.*choices=\(16, 32\).*choose another study_name"):
        run(small, tmp_path, num_trials=2, effective_batch=changed)
    study = run(small, tmp_path, num_trials=2, lr=(1e-2, 1.0))  # other than a range, which it can
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2


def test_a_recipe_takes_what_is_common_for_its_own_use(tmp_path: Path) -> None:
    def recipe(seed: int) -> dict[str, Any]:
        return small()

    study = run(recipe, tmp_path, num_trials=2, search_space=lambda trial: {"seed": trial.suggest_int("seed", 5, 9)})
    assert [trial.user_attrs["seed"] for trial in study.trials] == [0, 1]


def test_a_directory_of_another_study_is_refused(tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    with pytest.raises(ArgumentError, match="It holds trial-0000, which study 'other' has not. Choose another one."):
        run(small, tmp_path, num_trials=2, study_name="other")


def test_a_recipe_that_was_changed_does_not_go_on_with_the_old_ones_trial(tmp_path: Path) -> None:
    def interrupt(record: object) -> None:
        if isinstance(record, StepReport):
            signal.raise_signal(signal.SIGINT)

    run(small, tmp_path, callbacks=[interrupt])
    with pytest.raises(ResumeError, match="clip_norm"):
        run(small, tmp_path, clip_norm=1.0)
    assert [trial.state for trial in run(small, tmp_path).trials] == [TrialState.COMPLETE] * 3


def test_jobs_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Define the recipe and other functions at the top of a module."):
        run(lambda: small(), tmp_path, jobs=2)
    with pytest.raises(ArgumentError, match="pass one that is not in memory"):
        run(small, tmp_path, jobs=2, storage=optuna.storages.InMemoryStorage())


# The command line.

RECIPE = """
import torch

def recipe(lr):
    data = torch.randn(64, 4), torch.randn(64, 1)
    return {
        "model": torch.nn.Linear(4, 1), "data": data, "validation_data": data, "micro_batch": 8,
        "loss_fn": torch.nn.functional.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=lr),
    }
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("digits.py").write_text(RECIPE)
    return "digits.py"


def arguments(recipe: str, *more: str) -> list[str]:
    return [
        "sweep",
        recipe,
        "--lr",
        "1e-3:1e-1",
        "--effective-batch",
        "8:16",
        "--no-progress",
        "--device",
        "cpu",
        *more,
    ]


def test_the_command(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With two processes; the same again has nothing to do and shows the same."""
    assert main(arguments(recipe_file, "--trials", "3", "--jobs", "2")) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["trial", "validation_loss", "lr", "effective_batch"]
    assert "3 trials: 3 to the end, 0 pruned" in table
    assert "cost of searching for micro-batches: 3 sizes tried, 0 OOMs, at most 0 samples of 192 run again" in table
    assert main(arguments(recipe_file, "--trials", "3", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["study"] == "digits"
    assert document["finished"] == len(document["trials"]) == 3
    values = [document["trials"][number]["values"] for number in document["best"]]
    assert values == sorted(values)
    assert {path.name for path in Path("sweeps/digits").iterdir()} == {
        *(".lock", "id", "study.db"),
        *(f"trial-{number:04d}" for number in range(3)),
    }


def test_what_recipes_print_in_other_processes_is_not_in_the_document(
    recipe_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(recipe_file).write_text("print('hello')\n" + RECIPE)
    assert main(arguments(recipe_file, "--trials", "2", "--jobs", "2", "--json")) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["finished"] == 2
    assert err.count("hello") == 2


def test_the_command_exits_with_4_when_it_is_interrupted(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = RECIPE.replace('"micro_batch": 8,', '"micro_batch": 8, "callbacks": [stop],')
    stop = (
        "import signal\ndef stop(record):\n    if hasattr(record, 'lr'):\n        signal.raise_signal(signal.SIGINT)\n"
    )
    Path("digits.py").write_text(stop + text)
    assert main(arguments(recipe_file, "--trials", "2")) == 4
    assert "0 trials: 0 to the end" in capsys.readouterr().out


def test_the_command_tells_what_is_wrong(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("digits.py").write_text(RECIPE.replace("recipe(lr)", "recipe(lr=0.1)").replace('"validation_data": data,', ""))
    assert main(arguments(recipe_file)) == 2
    assert "error: validation_data=None" in capsys.readouterr().err
