"""What validations report, by names, before there has been one: a callback that goes by another would wait in vain.

The loss and the metrics are known at once. What is returned beside a loss shows in the first window; a loss may return
more in eval mode, so that where a name is missing it is computed of a few samples as a validation does.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from autoaccum.events import StepReport
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.reporting.lines import means_of
from autoaccum.training.options import FitArguments
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Losses, read
from autoaccum.window.attributes import Attributes
from autoaccum.window.snapshot import Snapshot


def of_arguments(arguments: FitArguments) -> tuple[set[str], bool]:
    """Return what validations report for sure, and whether anything else may stand beside the loss."""
    loss_fn = arguments.loss_fn
    # Those of PyTorch return a tensor and nothing else; what holds or is derived from one may return anything.
    is_module = type(loss_fn).__module__ == "torch.nn.modules.loss"
    is_function = getattr(functional, getattr(loss_fn, "__name__", ""), None) is loss_fn
    return {"loss", *(arguments.metrics or ())}, loss_fn is None or not (is_module or is_function)


def after_window(report: StepReport, trainer: Any) -> set[str] | None:
    """Return what validations report, of a trainer that has run a window; None where it cannot be told."""
    sure, _ = of_arguments(trainer._arguments)
    # Of several ranks not all need ask, and a forward may wait for those of the others.
    beside = _in_eval_mode(trainer._validator) if trainer._group is None else None
    return None if beside is None else sure | beside | means_of(report.outputs).keys()


def _in_eval_mode(validator: Any) -> set[str] | None:
    """Return what the loss of a few samples of a validation returns beside itself, of which nothing else remains.

    None where that cannot be told: validations say what is wrong.
    """
    # Losses of whole windows, and what a window shares, are computed of more than a few samples.
    if type(validator) is not Validator:
        return None
    snapshot, attributes = Snapshot(validator._modules, validator._device), Attributes(validator._modules)
    snapshot.take()

    def look() -> set[str]:
        with validator._evaluating():
            size = 2 * validator._fewest
            losses = Losses()
            losses.add(size, validator._loss(validator._source.example(size), size))
            outputs = validator._outputs_of(size)
            read([losses, outputs])
            return {*losses.joined()[1], *outputs.means()}

    try:
        found = attempt(look)
    except Exception:
        return None
    finally:
        validator._computed = None
        if validator._metrics is not None:
            validator._metrics.forget()
        attributes.restore()
        snapshot.restore()
    return None if isinstance(found, RanOut) else found
