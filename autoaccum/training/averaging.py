"""``EMA``: an exponential moving average of a model's weights, kept with the run that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.distributed.fsdp import units_of
from autoaccum.errors import ArgumentError, CheckpointCorruptError
from autoaccum.events import Record, Started, StepReport
from autoaccum.memory.oom import insist
from autoaccum.training.hooks import Ready
from autoaccum.training.optimizer_attributes import evaluating
from autoaccum.training.options import FitArguments
from autoaccum.training.synonyms import answering

State = dict[str, Any]


class EMA(Ready):
    """An exponential moving average of the model's weights: a callback, which steps once a window that committed.

    Each window ``average = d * average + (1 - d) * weight``, of parameters and of buffers that are floats; other
    buffers are copied. A window that is replayed counts once, and so does one whose step was left out. The averages lie
    where the weights lie and take as much memory again; of weights in 16 bits they are kept in 32. They are saved in
    the run's checkpoints, so that a run that was killed and goes on ends with the same averages, to the bit.

    >>> import autoaccum, torch
    >>> model, data = torch.nn.Linear(3, 1), (torch.randn(20, 3), torch.randn(20, 1))
    >>> ema = EMA(decay=0.9)
    >>> _ = autoaccum.fit(
    ...     model, data, effective_batch=4, loss_fn=torch.nn.functional.mse_loss, callbacks=[ema], progress=False,
    ...     device="cpu",
    ... )
    >>> with ema.applied(model):
    ...     outputs = model(data[0])  # of the averaged weights; those that were trained are back after it
    >>> _ = ema.copy_to(model)  # for good
    """

    @answering("EMA")
    def __init__(self, decay: float = 0.999, *, warm_up: bool = True, validate: bool = False) -> None:
        """Set up.

        Args:
            decay: ``d``, from 0 (the last weights) to below 1.
            warm_up: let ``d`` be (1 + n) / (10 + n) at most in window n, so that the first weights do not stay.
            validate: have the run's validations use the averages, and with them all that goes by these: the best
                checkpoint, whose averages are then what ``load_best`` puts into a model.

        Raises:
            ArgumentError: ``decay`` is none.
        """
        self.decay = _checks.number_between("decay", decay, 0, 1)
        self.warm_up = _checks.flag("warm_up", warm_up)
        self.validate = _checks.flag("validate", validate)
        self.updates = 0
        """Windows that were averaged."""
        self._weights: dict[str, torch.Tensor] = {}
        self._model: nn.Module | None = None  # that of the run, once that has begun
        self._is_loaded = False  # whether the averages come from a checkpoint that the run is yet to begin from

    def check(self, arguments: FitArguments) -> None:
        """Refuse a sharded model, of which no rank has all.

        Raises:
            ArgumentError: it is one.
        """
        if units_of(arguments.model):
            cure = "Averages of a model in parts are not kept yet: leave it out, or do not call fully_shard."
            raise ArgumentError("callbacks", "EMA", "none with a sharded model", cure)

    def __call__(self, record: Record, trainer: Any) -> None:
        """Begin with the run, and step with its windows."""
        if isinstance(record, Started):
            self._begin(trainer.model, is_new=trainer.step == 0)
        elif isinstance(record, StepReport):  # which comes once a window has committed, and never for a replay
            with evaluating(trainer.optimizer):
                self._step()

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the averages by the names of the model's parameters and buffers; empty before the run begins."""
        return dict(self._weights)

    @contextmanager
    def applied(self, model: nn.Module | None = None) -> Iterator[None]:
        """Have the model use the averages within this; its own weights are put back, to the bit.

        Args:
            model: of the same weights; the run's when left out.

        Raises:
            ArgumentError: there are no averages yet, or the model has other weights.
        """
        there = self._counterparts(model)
        # On the host: beside the model and its averages a device may have no room for a third copy.
        kept = insist(partial(_on_host, there), "a model's weights were copied to the host")
        try:
            self._copy(there)
            yield
        finally:
            with torch.no_grad():
                for name, tensor in there.items():
                    insist(partial(tensor.copy_, kept[name]), "a model's weights were put back")

    def copy_to(self, model: nn.Module) -> nn.Module:
        """Copy the averages into a model, in place of its weights, and return it.

        Raises:
            ArgumentError: there are no averages yet, or the model has other weights.
        """
        self._copy(self._counterparts(model))
        return model

    def validating(self) -> Any:
        """Return a context that validations of the run are within: with the averages, where that was asked for."""
        return self.applied() if self.validate and self._weights else nullcontext()

    def state_dict(self) -> State:
        """Return the averages, of how many windows they are, and whether validations go by them."""
        return {"updates": self.updates, "weights": dict(self._weights), "validate": self.validate}

    def load_state_dict(self, state: State) -> None:
        """Put back what ``state_dict`` returned: taken up by the run that begins next."""
        # Of which model they are is seen when the run begins, which has the model.
        self.updates, self._weights, self._is_loaded = state["updates"], dict(state["weights"]), True

    # The model's weights, and their averages.

    def _begin(self, model: nn.Module, *, is_new: bool) -> None:
        """Take up the averages that were loaded, or begin with the weights as they are."""
        current = _tensors(model)
        is_same, self._model = self._model is model, model
        # A checkpoint is read before the run begins, when the model may be elsewhere yet.
        if self._is_loaded and self._weights:
            _check_alike(self._weights, current)
            # They come from the disk, and so lie on the host.
            self._weights = {name: value.to(current[name].device) for name, value in self._weights.items()}
        # A trainer that is asked to train on keeps what it has; another run, of the same object, has nothing of it.
        elif is_new or not is_same or not self._weights:
            self.updates = 0
            self._weights = insist(partial(_begun, current), "a model's weights were averaged")
        self._is_loaded = False

    @torch.no_grad()
    def _step(self) -> None:
        """Average the weights of one more window."""
        if self._model is None:
            return
        # The first windows of a run would be outweighed for a thousand windows by weights that were drawn.
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warm_up else self.decay
        # Those of one type are averaged by one call, as an optimizer steps: a model may have thousands of tensors.
        averages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for name, tensor in _tensors(self._model).items():
            average = self._weights.get(name)
            if average is None or average.shape != tensor.shape:  # made, or made anew, by a forward
                self._weights[name] = insist(partial(_as_average, tensor), "a buffer was averaged")
            elif not _is_averaged(tensor):
                average.copy_(tensor)
            elif average.dtype != tensor.dtype:
                # One by one, for each is copied to 32 bits on the way.
                insist(partial(_lerp, [average], [tensor], 1 - decay), "a model's weights were averaged")
            else:
                averages.append(average)
                weights.append(tensor)
        if averages:
            insist(partial(_lerp, averages, weights, 1 - decay), "a model's weights were averaged")

    def _counterparts(self, model: nn.Module | None) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that there are averages of.

        Raises:
            ArgumentError: there are none yet, or they are of another model.
        """
        # All of it is looked at before any of it is written to.
        model = self._model if model is None else model
        if model is None or not self._weights:
            accepted = "averages, which there are once a run with this EMA among its callbacks has begun"
            raise ArgumentError("model", type(model).__name__, accepted)
        there = _tensors(model)
        for name, average in self._weights.items():
            if name not in there or there[name].shape != average.shape:
                accepted = f"a model with {name!r} of shape {tuple(average.shape)}, as that of the run"
                raise ArgumentError("model", type(model).__name__, accepted)
        return {name: there[name] for name in self._weights}

    @torch.no_grad()
    def _copy(self, there: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in there.items():
            insist(partial(tensor.copy_, self._weights[name]), "averages were copied into a model")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by their names; what goes by several names once, by the first."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    return found | dict(model.named_buffers())


def _is_averaged(tensor: torch.Tensor) -> bool:
    # Between two counts, or two indices, there is nothing.
    return tensor.is_floating_point() or tensor.is_complex()


def _as_average(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy to begin an average with."""
    # What a decay of 0.999 leaves of a difference is below the last bit of a bfloat16.
    is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return tensor.to(torch.float32) if is_short else tensor.clone()


@torch.no_grad()
def _begun(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _as_average(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def _lerp(averages: list[torch.Tensor], weights: list[torch.Tensor], weight: float) -> None:
    """Move averages towards weights by a fraction of what is between them."""
    # To other bits first, which takes memory: what is in place takes none, and so is never done by halves.
    alike = [w.to(average.dtype) for average, w in zip(averages, weights, strict=True)]
    torch._foreach_lerp_(averages, alike, weight)


def _check_alike(saved: Mapping[str, Any], current: Mapping[str, torch.Tensor]) -> None:
    """Check that averages from a checkpoint are of the model that is trained.

    Raises:
        CheckpointCorruptError: they are of another one.
    """
    for name, value in saved.items():
        there = current.get(name)
        if there is None or value.shape != there.shape:
            problem = f"holds {name!r}, which is none of this model's"
            raise CheckpointCorruptError("", problem, entry="callbacks.state.weights")
