"""Several ranks, a second run in the same process, forks: what is refused, and what is safe."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import autoaccum
from autoaccum.errors import AlreadyRunningError, ArgumentError, CheckpointLockedError
from autoaccum.events import StepReport
from autoaccum.training.single_process import holding, is_sharing, several_processes
from tests.processes import in_turn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")

DATA = (torch.arange(24.0).reshape(8, 3), torch.arange(8.0).reshape(8, 1))


def fit(model: nn.Module | None = None, **options: Any) -> autoaccum.FitResult:
    settings: dict[str, Any] = {"effective_batch": 4, "micro_batch": 2, "loss_fn": mse_loss, "cache": False}
    return autoaccum.fit(
        nn.Linear(3, 1) if model is None else model, DATA, device="cpu", progress=False, **{**settings, **options}
    )


def accumulator(model: nn.Module | None = None, **options: Any) -> autoaccum.Accumulator:
    model = nn.Linear(3, 1) if model is None else model
    return autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mse_loss, **options)


def probe(model: nn.Module | None = None, **options: Any) -> object:
    return autoaccum.probe(
        nn.Linear(3, 1) if model is None else model, DATA, loss_fn=mse_loss, device="cpu", max_micro_batch=4, **options
    )


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group that speaks to nobody: a real one leaves threads behind, on which a copy of the process waits."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = getattr(request, "param", 1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    yield
    torch.distributed.destroy_process_group()


class TestRanks:
    @pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
    @pytest.mark.parametrize("begin", [fit, accumulator, probe])
    def test_of_a_launcher(self, begin: Callable[..., object], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, "4")
        model = nn.Linear(3, 1)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ArgumentError, match=rf"ranks='together'.*{name} is 4.*ranks='independent'") as caught:
            begin(model)
        assert caught.value.argument == "ranks"
        assert all(map(torch.equal, before, model.parameters()))
        begin(model, ranks="independent")

    @pytest.mark.parametrize("value", ["1", "", "many"])
    def test_one_is_not_several(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", value)
        assert fit().num_steps == 2

    @pytest.mark.parametrize("group", [3], indirect=True)
    @pytest.mark.usefixtures("group")
    def test_of_a_process_group(self) -> None:
        with pytest.raises(ArgumentError, match="the process group has 3"):
            fit()
        assert fit(ranks="independent").num_steps == 2

    @pytest.mark.usefixtures("group")
    def test_of_a_group_of_one(self) -> None:
        assert several_processes() == ""
        assert fit().num_steps == 2

    @pytest.mark.usefixtures("group")
    @pytest.mark.parametrize("ranks", ["together", "independent"])
    @pytest.mark.parametrize("begin", [fit, accumulator, probe])
    def test_a_wrapped_model(self, begin: Callable[..., object], ranks: str) -> None:
        wrapped = DistributedDataParallel(nn.Linear(3, 1))
        for model in (wrapped, nn.Sequential(wrapped), torch.compile(wrapped)):
            with pytest.raises(ArgumentError, match=r"model=.*DistributedDataParallel.*model\.module"):
                begin(model, ranks=ranks)
        begin(wrapped.module, ranks=ranks)

    @pytest.mark.usefixtures("group")
    def test_a_sharded_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        fully_shard(model[0], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(
            ArgumentError, match="model='FSDPLinear': expected a model of this process alone.*ranks='together'"
        ):
            fit(model)

    @pytest.mark.usefixtures("group")
    def test_parameters_that_ranks_share(self) -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        model = nn.Linear(3, 1)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
        assert is_sharing(model.weight)
        with pytest.raises(ArgumentError, match="model='weight: DTensor'"):
            fit(model)

    def test_what_only_its_name_says(self) -> None:
        with pytest.raises(ArgumentError, match="ranks='alone': expected 'together' or 'independent'"):
            fit(ranks="alone")
        checkpointed = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(nn.Linear(3, 1))
        assert fit(checkpointed).num_steps == 2, "it speaks to nobody"

    def test_a_sweep(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")

        def recipe() -> dict[str, Any]:
            return {
                "model": nn.Linear(3, 1),
                "data": DATA,
                "loss_fn": mse_loss,
                "validation_data": DATA,
                "device": "cpu",
            }

        settings: dict[str, Any] = {"lr": (0.1, 0.2), "effective_batch": 4, "num_trials": 1, "directory": tmp_path}
        with pytest.raises(ArgumentError, match="A sweep is for one process"):
            autoaccum.sweep(recipe, **settings)
        assert len(autoaccum.sweep(recipe, **settings, ranks="independent").trials) == 1


class TestTwoRuns:
    def test_within_a_callback(self) -> None:
        refused: list[str] = []

        def callback(record: object) -> None:
            if isinstance(record, StepReport):
                for begin in (fit, probe, accumulator().step):
                    with pytest.raises(AlreadyRunningError, match="while fit goes on .* has called it") as caught:
                        begin(*[DATA] * (begin not in (fit, probe)))
                    refused.append(caught.value.running)

        alone, model = nn.Linear(3, 1), nn.Linear(3, 1)
        model.load_state_dict(alone.state_dict())
        fit(alone)
        fit(model, callbacks=[callback])
        assert refused == ["fit"] * 6
        assert all(map(torch.equal, alone.parameters(), model.parameters())), "nothing has been drawn or seeded"

    def test_within_a_loss(self) -> None:
        inner = accumulator()

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inner.step(batch)
            return mse_loss(model(batch[0]), batch[1])

        with pytest.raises(AlreadyRunningError, match=r"Accumulator\.step cannot begin while fit"):
            fit(loss_fn=None, training_step=step)

    def test_in_threads(self) -> None:
        inside, over = threading.Event(), threading.Event()

        def hold(record: object) -> None:
            inside.set()
            over.wait()

        results: list[autoaccum.FitResult] = []
        thread = threading.Thread(target=lambda: results.append(fit(callbacks=[hold])))
        thread.start()
        inside.wait()
        try:
            for begin in (fit, probe, lambda: accumulator().step(DATA)):
                with pytest.raises(AlreadyRunningError, match="in another thread"):
                    begin()
        finally:
            over.set()
            thread.join()
        assert results[0].num_steps == 2
        assert fit().num_steps == 2

    def test_one_after_the_other(self) -> None:
        def fails(model: nn.Module, batch: Any) -> torch.Tensor:
            raise LookupError

        with pytest.raises(LookupError):
            fit(loss_fn=None, training_step=fails)
        one, two = accumulator(), accumulator()
        for _ in range(2):
            one.step(DATA)
            two.step(DATA)
        assert fit().num_steps == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@in_turn
class TestForks:
    @staticmethod
    def child(work: Callable[[], object]) -> int:
        """Return the exit code of a process that does it."""
        if (pid := os.fork()) == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_after_a_run(self, tmp_path: Path) -> None:
        fit(run_dir=tmp_path / "a")
        assert self.child(lambda: fit(run_dir=tmp_path / "b")) == 0
        assert (tmp_path / "b" / "checkpoints" / "step-00000002").exists()

    def test_in_a_run(self, tmp_path: Path) -> None:
        """The copy of a process that trains is free, whichever of its threads has forked."""
        codes: list[int] = []

        def callback(record: object) -> None:
            if isinstance(record, StepReport) and record.step == 1:
                codes.append(self.child(lambda: fit(run_dir=tmp_path / "b")))
                thread = threading.Thread(target=lambda: codes.append(self.child(fit)))
                thread.start()
                thread.join()

        result = fit(run_dir=tmp_path / "a", callbacks=[callback])
        assert codes == [0, 0]
        assert result.num_steps == 2

    def test_a_lock_that_is_held_while_the_process_is_copied(self) -> None:
        with holding("fit"):
            assert self.child(fit) == 0


def test_who_holds_a_directory_is_said(tmp_path: Path) -> None:
    read, write = os.pipe()
    done, end = os.pipe()
    if (pid := os.fork()) == 0:

        def callback(record: object) -> None:
            if isinstance(record, StepReport):
                os.write(write, b".")
                os.read(done, 1)

        fit(run_dir=tmp_path, callbacks=[callback])
        os._exit(0)
    os.read(read, 1)
    try:
        with pytest.raises(CheckpointLockedError, match=rf"in process {pid}") as caught:
            fit(run_dir=tmp_path)
        assert caught.value.pid == pid
    finally:
        os.write(end, b"..")
        os.waitpid(pid, 0)
