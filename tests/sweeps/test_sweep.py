"""Sweeps: the same data for every trial, one memory model for all, nothing lost when a process is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
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

from autoaccum.errors import ArgumentError, RecipeResultError
from autoaccum.events import Resumed, Started, StepReport
from autoaccum.runs.records import command_line, commit
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp
from tests.processes import in_turn
from tests.sweeps.sweeping import outcomes, pruner, read, run, small

forks = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
Recipe = Callable[..., dict[str, Any]]


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


# What is searched.

GRID: dict[str, Any] = {"lr": [1e-3, 1e-2], "effective_batch": [16, 32]}


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


@pytest.mark.parametrize("sampler", ["grid", lambda seed: optuna.samplers.GridSampler(GRID)])
def test_a_grid_is_gone_through(sampler: Any, tmp_path: Path) -> None:
    grid = GRID
    study = run(small, tmp_path, **grid, sampler=sampler, num_trials=4, pruner="none")
    assert sorted(tuple(trial.params.values()) for trial in study.trials) == [
        (lr, batch) for lr in grid["lr"] for batch in grid["effective_batch"]
    ]


def test_a_number_is_taken_by_all_trials(tmp_path: Path) -> None:
    study = run(small, tmp_path, lr=0.25, effective_batch="16,32", num_trials=2, seed=3)
    assert [set(trial.params) for trial in study.trials] == [{"effective_batch"}] * 2
    assert {report.lr for number in (0, 1) for report in read(tmp_path, number, StepReport)} == {0.25}


def test_the_same_seed_is_the_same_study_and_another_is_another(tmp_path: Path) -> None:
    """The model's weights are drawn after the seed is set, and the sampler's draws are each trial's own."""
    first = outcomes(run(small, tmp_path / "a", micro_batch=8, num_trials=2))
    assert first == outcomes(run(small, tmp_path / "b", micro_batch=8, num_trials=2))
    assert first != outcomes(run(small, tmp_path / "c", micro_batch=8, num_trials=2, seed=1))
    assert len({params["lr"] for _, params, _ in first}) == 2


# Memory.


@pytest.mark.filterwarnings("ignore:It could not be measured")  # for which there is hardly room
def test_eight_trials_where_no_effective_batch_fits_at_once(tmp_path: Path) -> None:
    limit = 100_000
    inputs, targets = classes(64)
    with simulated_memory(limit), pytest.raises(torch.OutOfMemoryError):
        nn.functional.cross_entropy(Broad()(inputs), targets).backward()
    with simulated_memory(limit):
        study = run(broad, tmp_path, effective_batch=[64, 128, 256], num_trials=8, samples=512)
    assert len(study.trials) == 8
    assert {trial.state for trial in study.trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert not any("not_fitting" in trial.user_attrs for trial in study.trials)
    origin = study.user_attrs["autoaccum origin"]
    assert (origin["torch"], origin["command"], origin["commit"]) == (torch.__version__, command_line(), commit())
    first, *rest = (trial.user_attrs for trial in study.trials)
    # Each looks once at what it was told; what more they try is together no more than what the first did.
    assert sum(found["search_trials"] - 1 for found in rest) <= first["search_trials"]
    assert first["ooms"] + sum(found["ooms"] for found in rest) <= 1


class Brittle(nn.Module):
    """Runs out of memory for more than 20 samples, which no peak foretells; more at once are faster."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        out: torch.Tensor = self.layer(inputs)
        return out


def test_what_ran_out_of_memory_in_one_trial_is_not_tried_again_by_the_next(tmp_path: Path) -> None:
    # A limit that stays: a failure says nothing of a limit above the one that it happened under, and what is free of the
    # machine's memory moves with everything else that runs on it.
    settings = {"effective_batch": 64, "num_trials": 6, "pruner": "none", "memory_limit": 2**32}
    study = run(lambda: small() | {"model": Brittle()}, tmp_path, **settings)
    ooms = [trial.user_attrs["ooms"] for trial in study.trials]
    assert ooms[0] >= 1
    assert ooms[3:] == [0, 0, 0]
    assert max(study.trials[5].user_attrs["micro_batches"]) >= 4


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


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@forks
@in_turn
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


def share(directory: Path, **settings: Any) -> None:
    """Two processes on one study: no trial is lost, and none is run twice."""
    settings = {"num_trials": 6, "pruner": pruner(), **settings}
    pids = [child(partial(run, small, directory, **settings)) for _ in range(2)]
    assert [ended(pid) for pid in pids] == [0, 0]
    storage = optuna.storages.RDBStorage(settings.get("storage") or f"sqlite:///{directory}/study.db")
    study = optuna.load_study(storage=storage, study_name="small")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 6
    for trial in study.trials:
        assert len(read(directory, trial.number, Started)) == 1
    assert len({trial.params["lr"] for trial in study.trials}) == 6, "they draw different trials"
    optuna.delete_study(storage=storage, study_name="small")
    storage.engine.dispose()


@forks
@in_turn
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    share(tmp_path)


@forks
@in_turn
def test_two_processes_share_a_study_on_postgresql(tmp_path: Path, postgresql: str) -> None:
    share(tmp_path, storage=postgresql)


@forks
@in_turn
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


def test_more_trials_of_the_same_study(tmp_path: Path) -> None:
    first = outcomes(run(small, tmp_path, num_trials=2, micro_batch=8))
    both = outcomes(run(small, tmp_path, num_trials=3, micro_batch=8))
    assert both[:2] == first
    assert both == outcomes(run(small, tmp_path / "at once", num_trials=3, micro_batch=8))


@pytest.mark.parametrize("storage", ["journal:{0}/study.journal", "sqlite:///{0}/other.db"])
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


def test_a_storage_that_does_not_answer_leaves_the_trial_to_be_gone_on_with(tmp_path: Path) -> None:
    settings = {"num_trials": 2, "micro_batch": 8, "checkpoint_every": 1, "study_name": "gone"}
    expected = outcomes(run(small, tmp_path / "whole", **settings))
    directory = tmp_path / "gone"

    def alter(command: str) -> None:
        with sqlite3.connect(directory / "study.db") as connection:
            connection.execute(command)
        connection.close()

    def lose(record: object) -> None:
        if isinstance(record, StepReport) and record.step == 2:
            alter(
                "CREATE TRIGGER IF NOT EXISTS full BEFORE INSERT ON trial_intermediate_values "
                "BEGIN INSERT INTO elsewhere VALUES (1); END"
            )

    with pytest.raises(optuna.exceptions.StorageInternalError):
        run(small, directory, callbacks=[lose], **settings)
    alter("DROP TRIGGER full")
    assert outcomes(run(small, directory, **settings)) == expected
    assert [record.step for record in read(directory, 0, Resumed)] == [1]


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
        ({"lr": (1e-2, 1e-3)}, "lr=(0.01, 0.001): expected (1e-4, 1e-1) or '1e-4:1e-1' for a range"),
        ({"lr": "1e-3:x"}, "lr='1e-3:x': expected"),
        ({"lr": (1e-3, 1e-2, 1e-1)}, "expected (1e-4, 1e-1)"),
        ({"lr": -1.0}, "lr=-1.0: expected a number above 0"),
        ({"effective_batch": [16, 16]}, "effective_batch=[16, 16]: expected"),
        ({"effective_batch": "64:32"}, "effective_batch='64:32': expected"),
        ({"effective_batch": "64:"}, "effective_batch='64:': expected"),
        ({"effective_batch": [16, 0]}, "effective_batch=0: expected an int of at least 1"),
        ({"metric": "accuracy"}, "direction=None: expected minimize or maximize, for each metric"),
        (
            {"metric": "accuracy", "direction": "maximize"},
            "metric='accuracy': expected one of validation_loss, seconds, samples. Others are reported by validations",
        ),
        ({"storage": "study.db"}, "For a SQLite file write 'sqlite:///study.db'"),
        ({"num_trials": 0}, "num_trials=0: expected an int of at least 1"),
        (
            {"run_dir": "runs"},
            "sweep() has no argument 'run_dir'. Besides its own arguments it takes fit's: effective_batch, ",
        ),
        ({"n_trials": 1}, "sweep() has no argument 'n_trials'. Besides its own arguments it takes fit's: effective_"),
        ({"lr": 0.1, "effective_batch": 16}, "lr=0.1: expected something to search for. Pass lr=(1e-4, 1e-1) or effe"),
        ({"effective_batch": None}, "effective_batch=None: expected samples to choose from"),
        ({"search_space": lambda trial: {"width": 3}}, "Write 'def recipe(width): ...' and use it there."),
        ({"optimizer": torch.optim.SGD}, "Write 'def recipe(lr): ...' and make the optimizer with it."),
        ({"validation_data": None}, "validation_data=None: expected data by whose loss trials are compared"),
        ({"recipe": {}}, "recipe={}: expected a function that returns the arguments of fit"),
        ({"recipe": lambda width: small()}, "width=None: expected a value, as the recipe takes it"),
        ({"search_space": {}}, "search_space={}: expected a function (trial)"),
        ({"search_space": lambda trial: None}, "search_space=None: expected a function that returns a dict"),
        ({"search_space": lambda trial: {"lr": 0.1}}, "lr=0.1: expected at most one of lr and search_space"),
        ({"search_space": lambda trial: {"samples": 9}}, "samples=9: expected the same for all trials"),
        ({"search_space": lambda trial: {"seed": 9}}, "seed=9: expected the same for all trials"),
        ({"sampler": "grid"}, "sampler='grid': expected a sampler of ranges, such as 'tpe'. lr is a range, from 0.001"),
        ({"sampler": optuna.samplers.TPESampler}, "expected a sampler of Optuna, a function (seed) -> sampler, or one"),
        ({"pruner": optuna.pruners.NopPruner}, "expected a pruner of Optuna"),
        ({"metric": ("seconds", "seconds")}, "expected one or more names, each once"),
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


def test_a_recipe_that_returns_something_else(tmp_path: Path) -> None:
    with pytest.raises(RecipeResultError, match="mlp returned Sequential, expected a dict"):
        run(mlp, tmp_path)


def test_a_directory_of_another_study_is_refused(tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    with pytest.raises(ArgumentError, match="expected that of study 'other', or an empty one for a new study"):
        run(small, tmp_path, num_trials=2, study_name="other")


def test_the_directory_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text("")
    with pytest.raises(ArgumentError, match="expected a directory that is not that of a run of fit. Pass another one"):
        run(small, tmp_path, num_trials=1)
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
