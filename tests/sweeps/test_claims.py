"""Which trial comes next: none lost, none twice, none too many."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from autoaccum.errors import ArgumentError
from autoaccum.sweeps.claims import Claims, directory_of
from autoaccum.sweeps.storages import open_storage
from tests.processes import in_turn


def begin(directory: Path, num_trials: int = 3, seed: int = 0) -> tuple[Claims, optuna.Study]:
    """On a storage beside the directory, so that several directories may share it."""
    claims = Claims(directory, num_trials, seed)
    url = f"sqlite:///{directory.parent / 'shared.db'}"
    return claims, claims.open(
        lambda: optuna.create_study(storage=url, study_name="shared", load_if_exists=True, sampler=RandomSampler())
    )


def finish(claims: Claims, study: optuna.Study) -> int | None:
    """Its number."""
    with claims.next(study, None) as trial:
        if trial is None:
            return None
        study.tell(trial.number, trial.suggest_float("x", 0, 1))
        return trial.number


def test_trials_come_until_enough_are_finished(tmp_path: Path) -> None:
    claims, study = begin(tmp_path / "a")
    assert [finish(claims, study) for _ in range(4)] == [0, 1, 2, None]


def test_pruned_trials_count_and_failed_ones_do_not(tmp_path: Path) -> None:
    claims, study = begin(tmp_path / "a", num_trials=2)
    for state in (TrialState.FAIL, TrialState.PRUNED):
        with claims.next(study, None) as trial:
            assert trial is not None
            study.tell(trial.number, state=state)
    assert [finish(claims, study) for _ in range(2)] == [2, None]


def test_a_trial_that_was_left_comes_again_with_what_it_had(tmp_path: Path) -> None:
    claims, study = begin(tmp_path / "a", seed=7)
    with claims.next(study, RandomSampler) as trial:
        assert trial is not None
        drawn = trial.suggest_float("x", 0, 1)
        assert claims.folder(trial).is_dir()
    with begin(tmp_path / "a", seed=8)[0].next(study, RandomSampler) as again:
        pass
    claims, study = begin(tmp_path / "a", seed=8)
    with claims.next(study, RandomSampler) as again:
        assert again is not None
        assert again.number == trial.number == 0
        assert again.suggest_float("x", 0, 1) == drawn
        assert again.user_attrs["seed"] == 7, "as it began"
    assert len(study.trials) == 1


def test_samplers_draw_by_the_trial_and_not_by_the_process(tmp_path: Path) -> None:
    drawn = {}
    for name, is_restarted in (("once", False), ("again", True)):
        (tmp_path / name).mkdir()
        claims, study = begin(tmp_path / name / "a")
        values = []
        for _ in range(3):
            if is_restarted:
                claims, study = begin(tmp_path / name / "a")
            with claims.next(study, RandomSampler) as trial:
                assert trial is not None
                values.append(trial.suggest_float("x", 0, 1))
                study.tell(trial.number, 0.0)
        drawn[name] = values
    assert drawn["once"] == drawn["again"]
    assert len(set(drawn["once"])) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@in_turn
def test_a_trial_that_another_process_runs_is_waited_for_and_taken_over(tmp_path: Path) -> None:
    claims, study = begin(tmp_path / "a", num_trials=1)
    ready, told = os.pipe()
    if (pid := os.fork()) == 0:
        claims, study = begin(tmp_path / "a", num_trials=1)
        with claims.next(study, None) as trial:
            assert trial is not None
            os.write(told, b".")
            signal.pause()
    os.read(ready, 1)
    lock = claims._lock(study.trials[0])
    assert lock is None, "it is held"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert finish(claims, study) == 0
    assert len(study.trials) == 1


def test_a_trial_that_ends_while_it_is_claimed_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, study = begin(tmp_path / "a", num_trials=1)
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING))
    lock = claims._lock

    def late(trial: Any) -> Any:
        """Between our look at the study and its lock, whoever runs it finishes it."""
        if study.trials[0].state == TrialState.RUNNING:
            study.tell(0, 0.5)
        return lock(trial)

    monkeypatch.setattr(claims, "_lock", late)
    with claims.next(study, None) as trial:
        assert trial is None, "all are finished"
    assert [trial.value for trial in study.trials] == [0.5]


def test_a_trial_that_finishes_while_we_look_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, study = begin(tmp_path / "a", num_trials=1)
    with claims.next(study, None) as trial:
        assert trial is not None
        looks = study.get_trials

        def look(**options: Any) -> Any:
            found = looks(**options)
            if trial.number in [t.number for t in looks(deepcopy=False, states=(TrialState.RUNNING,))]:
                study.tell(trial.number, 0.0)
            return found

        monkeypatch.setattr(study, "get_trials", look)
        with claims.next(study, None) as another:
            assert another is None
    assert len(study.trials) == 1


def test_a_path_is_no_url(tmp_path: Path) -> None:
    directory = tmp_path / "a b?c#d%20e{f}"
    claims = Claims(directory, 1, 0)
    study = claims.open(lambda: optuna.create_study(storage=open_storage(None, directory), load_if_exists=True))
    assert finish(claims, study) == 0
    assert (directory / "study.db").exists()
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArgumentError, match=r"directory='.*file.*': expected one that can be written to"):
            Claims(path, 1, 0)


def test_what_is_not_a_trial_may_lie_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a" / "trial-notes").mkdir(parents=True)
    claims, study = begin(tmp_path / "a", num_trials=1)
    assert finish(claims, study) == 0


def test_a_change_of_directory_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    claims, study = begin(Path("a"), num_trials=1)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    with claims.next(study, None) as trial:
        assert trial is not None
        assert claims.folder(trial) == tmp_path / "a" / "trial-0000"


def test_a_name_of_a_study_is_no_path() -> None:
    assert directory_of("../vision/lr 1:2") == Path("sweeps/vision-lr-1-2")


def test_a_study_has_one_directory(tmp_path: Path) -> None:
    claims, study = begin(tmp_path / "a", num_trials=1)
    assert finish(claims, study) == 0
    assert finish(*begin(tmp_path / "a", num_trials=2)) == 1
    with pytest.raises(ArgumentError, match="expected that of study 'shared', or an empty one for a new study. All"):
        begin(tmp_path / "b")
