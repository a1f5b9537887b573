"""The arguments of ``fit``, each declared once: its type, default, text, check, and what it decides.

What else needs to know the arguments takes them from here. ``FitArguments`` is what ``Trainer`` works with. ``probe``,
``Accumulator`` and ``check`` share some of its fields, as these say themselves; ``sweep`` declares those of its own in
the same manner. The plain signatures of these functions, with the texts in their docstrings, are written from the
declarations by ``python -m tests.write_signatures``. The command line makes its options of them, recipes and sweeps
check names against them, and a run's directory keeps their values.

A check that needs no more than arguments is declared with them, and is made before anything else is done. What needs
the model, the data or the device to be judged is judged where it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.events import Record
from autoaccum.loss.functions import loss_function
from autoaccum.loss.stated import CountItems, Reducing
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.budget import Budget
from autoaccum.planning.ladder import SavingMode
from autoaccum.planning.schedules import Progress, Schedule, schedule_of
from autoaccum.ranks.balance import Balance
from autoaccum.ranks.summing import Compression
from autoaccum.training.alone import Ranks, of_ranks
from autoaccum.training.declarations import Checked, Own, arguments, arguments_of, check, option, values_of
from autoaccum.training.learning_rate import MakeScheduler, Scaling
from autoaccum.training.metrics import Metric
from autoaccum.window.optimizers import OptimizerLike
from autoaccum.window.precision import Precision
from autoaccum.window.surroundings import surroundings_of

Callback = Callable[[Record], None] | Callable[[Record, Any], None]
"""Takes all that a run reports, as it happens, and the ``Trainer`` where it has a second parameter: see ``hooks``."""


def schedule_if_any(
    effective_batch: int | str | Schedule | Callable[[Progress], int] | None,
) -> Schedule | None:
    """Return the schedule of a probe, which needs none."""
    return None if effective_batch is None else schedule_of(effective_batch)


# One function may check several arguments that only make sense together, and what it returns is used further on.
CHECKS: tuple[Callable[..., Any], ...] = (
    schedule_of,
    schedule_if_any,
    _checks.of_windows,
    _checks.of_num_items,
    _checks.of_reduction,
    _checks.of_patience,
    _checks.of_memory_saving,
    _checks.of_micro_batch,
    _checks.of_num_workers,
    _checks.of_collate_fn,
    split_of,
    _checks.of_seed,
    _checks.of_lr,
    _checks.of_optimizer,
    _checks.of_lr_scheduler,
    _checks.of_flags,
    _checks.of_accumulation,
    _checks.of_verification,
    loss_function,
    _checks.of_validation,
    _checks.of_run_directory,
    _checks.of_checkpoint_every,
    Budget,
    _checks.recorded_plans,
    of_ranks,
    _checks.of_balance,
    _checks.of_compression,
    _checks.of_callbacks,
    _checks.of_event_callbacks,
)
"""The order in which checks are made, so that of several mistakes the same one is always named."""


@arguments
class FitArguments:
    """The arguments of one call of ``fit``."""

    # What is trained, on what. A run's directory keeps descriptions of these objects, and a run that goes on is
    # compared with them.
    # In place, for a copy would take its memory twice; whoever calls has the trained model at hand.
    model: nn.Module = option(
        "the module to train, in place.",
        is_positional=True,
        in_sweeps="own",
        probe=Own(text="the module to train."),
        accumulator=Own(text="the module to train; compiled or not."),
        in_check=Own(text="the module to train."),
    )
    # Windows are cut from samples, so the size of a loader's batches says nothing.
    data: Any = option(
        "a Dataset, a DataLoader (its dataset, collate_fn, workers and sampler are used, its batch size is not), a "
        "tuple or dict of tensors with one row per sample, or any iterable of batches. A batch is any pytree whose "
        "tensors have one row per sample.",
        is_positional=True,
        in_sweeps="own",
        probe=Own(text="as for ``fit``; its first samples are repeated to make batches of any size."),
        in_check=Own(
            name="batch",
            text="a batch of at least 2 samples, any pytree whose tensors have one row per sample; or a Dataset, a "
            "DataLoader or another iterable of batches, of which some samples are read; beside a loss_fn or a "
            "collate_fn a list of samples, and beside a loss_fn one of three batches or more, too. Six of them are "
            "measured, that differ as much as they can: the more kinds of sample it holds, the more is seen.",
        ),
    )
    # The one argument besides that has no default: any number would be a guess at what the user wants to learn.
    effective_batch: int | str | Schedule | Callable[[Progress], int] = option(
        'samples per optimizer step; or a schedule, its text such as "64, 1000:256", or a function (Progress) -> '
        "samples: see autoaccum.schedules.",
        check=schedule_of,
        # A probe may only want to know what fits.
        probe=Own(
            text="samples per optimizer step, the most of them where it is a schedule: no larger micro-batch is tried, "
            "and a plan is made.",
            annotation="int | str | Schedule | Callable[[Progress], int] | None",
            default=None,
            check=schedule_if_any,
        ),
    )
    # How its loss is computed: by one of these two functions, or by the model itself.
    # Either may return several losses, or a loss and what is to be seen beside it.
    loss_fn: Callable[[Any, Any], Any] | None = option(
        "(outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a dict of "
        'what is to be seen beside it: ``return loss, {"accuracy": ...}``.',
        default=None,
        check=loss_function,
        probe=Own(),
        accumulator=Own(),
        in_check=Own(),
    )
    training_step: Callable[[Any, Any], Any] | None = option(
        "(model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With neither, the "
        'model returns its loss, as ``.loss`` or ``["loss"]``.',
        default=None,
        check=loss_function,
        probe=Own(),
        accumulator=Own(),
        in_check=Own(),
    )
    # Whoever gives no count is asked for none: most losses tell it. What does not is announced with this as its cure.
    num_items: CountItems | None = option(
        "(micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss; of several "
        "losses a dict of these by their names, or a list.",
        default=None,
        check=_checks.of_windows,
        accumulator=Own(),
        in_check=Own(check=_checks.of_num_items),
    )
    # What a graph shows, a measurement decides; whoever knows says so, and is told if a measurement contradicts.
    reduction: Reducing = option(
        "mean or sum: how the loss of a micro-batch combines its samples or items; measured if left out. With "
        "num_items, a sum is divided by the items of the full batch.",
        default=None,
        check=_checks.of_reduction,
        accumulator=Own(),
        in_check=Own(),
    )
    # Between the samples of a window nothing else can pass: a micro-batch is all that a step sees of it.
    # How the optimizer steps.
    optimizer: OptimizerLike | None = option(
        "an Optimizer or a function (parameters) -> Optimizer; AdamW when left out.",
        default=None,
        check=_checks.of_optimizer,
        probe=Own(
            text="an Optimizer or a function (parameters) -> Optimizer; AdamW when left out. Its state must fit too."
        ),
        # Whoever writes a loop has an optimizer at hand, for a scheduler and its own state.
        accumulator=Own(
            text="over its parameters. One whose ``step`` needs a closure, such as LBFGS or SAM, is given one.",
            annotation="torch.optim.Optimizer",
            default=MISSING,
            is_positional=True,
        ),
    )
    # None and not 1e-3, so that an lr beside an optimizer of one's own, which it could not reach, is refused.
    lr: float | None = option(
        "learning rate of the AdamW that is made when optimizer is left out; 1e-3 when left out too.",
        default=None,
        check=_checks.of_lr,
    )
    lr_scheduler: MakeScheduler | None = option(
        "function (optimizer, num_steps) -> LRScheduler; stepped once per window, or for every base_batch samples "
        "where only training tells how many windows there are.",
        default=None,
        check=_checks.of_lr_scheduler,
    )
    lr_scaling: Scaling = option(
        "none, linear or sqrt: lr times effective_batch / base_batch, or its root.",
        default="none",
        decides="training",
    )
    # No default: only the user knows at which batch a rate was found to be right.
    base_batch: int | None = option(
        "effective batch that lr is right for.",
        default=None,
        decides="training",
    )
    # How long. Trials of a sweep are compared after the same samples, so a search may not set any of these.
    epochs: int | None = option(
        "passes over the data; one when no budget is given.",
        default=None,
        check=Budget,
        decides="budget",
        in_sweeps="shared",
    )
    steps: int | None = option(
        "optimizer steps, over as many epochs as that takes.",
        default=None,
        check=Budget,
        decides="budget",
        in_sweeps="shared",
    )
    samples: int | None = option(
        "samples to train on; the last window is cut to it.",
        default=None,
        check=Budget,
        decides="budget",
        in_sweeps="shared",
    )
    # How windows are run. Laws 1 and 2 say that this decides speed and memory, and nothing of what is trained.
    micro_batch: int | Literal["auto"] | Sequence[Sequence[int]] = option(
        '"auto", the samples of one forward and backward, or the plans of a recorded run ([report.micro_batches for '
        "report in history]) to repeat it bit for bit: on an accelerator with "
        "torch.use_deterministic_algorithms(True), and on CUDA CUBLAS_WORKSPACE_CONFIG=:4096:8.",
        default="auto",
        check=_checks.recorded_plans,
        # Batches are what its caller makes of them, so there is no recorded run to repeat.
        accumulator=Own(
            text='"auto", or the samples of one forward and backward.',
            annotation='int | Literal["auto"]',
            check=_checks.of_micro_batch,
        ),
    )
    max_micro_batch: int | None = option(
        "the most samples to try at once.",
        default=None,
        check=_checks.of_windows,
        probe=Own(),
        accumulator=Own(),
    )
    # For what only the user knows: a loss that needs several samples, statistics of few that are poor.
    min_micro_batch: int | None = option(
        "the fewest samples of one forward and backward; a window that has fewer is run as one micro-batch.",
        default=None,
        check=_checks.of_windows,
        probe=Own(text="the fewest samples of one forward and backward."),
        accumulator=Own(),
    )
    memory_limit: MemoryLimit = option(
        'device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one of these, '
        "asked again as training goes on.",
        default=None,
        # A function is asked once: a probe has ended before a limit has moved.
        probe=Own(
            text='device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one '
            "of these."
        ),
        accumulator=Own(),
    )
    # For what no trial has shown: fragmentation, a longer sample, another process.
    headroom: float = option(
        "fraction of the limit that plans leave free, but for micro-batches of up to four samples.",
        default=0.05,
        check=_checks.of_windows,
        probe=Own(text="fraction of the limit to leave free, but for micro-batches of up to four samples."),
        accumulator=Own(),
    )
    # What it does changes no number, so that it is no choice of the user's unless something else is to be found out.
    memory_saving: SavingMode = option(
        "auto: where not even the smallest micro-batch fits, blocks compute their forward twice (checkpoint), then "
        "tensors go to the host (offload), to the same bits; off: never; one of these, or both: always.",
        default="auto",
        check=_checks.of_memory_saving,
        accumulator=Own(),
    )
    # A minute, in which a neighbour's validation or the end of a process gives back what it held.
    patience: float = option(
        "seconds to wait for memory that others hold where not even the smallest micro-batch fits beside it.",
        default=60.0,
        check=_checks.of_patience,
        # Whoever asks what fits wants to know what fits now.
        probe=Own(default=0.0),
        accumulator=Own(),
    )
    # From here on some decide the numbers: a rounding, a clipping.
    precision: Precision = option(
        "fp32 (as the model is), bf16 or fp16 (both by autocast).",
        default="fp32",
        decides="training",
        probe=Own(),
        accumulator=Own(),
    )
    clip_norm: float | None = option(
        "clip each window's gradient to this 2-norm.",
        default=None,
        check=_checks.of_windows,
        decides="training",
        accumulator=Own(text="clip each batch's gradient to this 2-norm."),
    )
    accumulate: Literal["auto", "weighted", "joined"] = option(
        "how micro-batches make the gradient: weighted: by what their losses count; joined: the loss is computed once, "
        "on the outputs of all of them, which run again in backward; auto: joined where weighted is not exact.",
        default="auto",
        check=_checks.of_accumulation,
        decides="training",
        accumulator=Own(),
        in_check=Own(),
    )
    # What is measured decides how micro-batches are weighted, and so what a run computes.
    verify: bool = option(
        "measure, on a few samples of the first window that is cut and now and then, that cut windows have the "
        "gradient of whole ones.",
        default=True,
        check=_checks.of_verification,
        decides="training",
        accumulator=Own(),
    )
    strict: bool = option(
        "raise NotExactError before a step on a gradient that was measured not to be the whole window's, or could not "
        "be measured, instead of saying so.",
        default=False,
        check=_checks.of_verification,
        accumulator=Own(),
    )
    # Where and from which seed it is computed.
    # How a forward is compiled may change the last bits of it, as another device may: runs go on with either.
    compile: bool = option("run the model through torch.compile.", default=False, check=_checks.of_flags)
    device: str | torch.device | None = option(
        "where to train, such as cpu or cuda:1; an accelerator where there is one.",
        default=None,
        probe=Own(),
        in_check=Own(text="where to compute, such as cpu or cuda:1; an accelerator where there is one."),
    )
    # Several processes that know nothing of each other look like one run that goes well, so they have to be asked for.
    ranks: Ranks = option(
        "together: the processes that torchrun has started share each window, and train one model; independent: each "
        "process that a launcher has started trains by itself.",
        default="together",
        check=of_ranks,
        probe=Own(
            text="together: several processes that were started together are refused; independent: each looks for "
            "itself."
        ),
        accumulator=Own(
            text="together: each process that torchrun has started passes its part of a batch, and all step on "
            "the gradient of the joined one; independent: each process that a launcher has started trains by itself."
        ),
        in_check=Own(
            text="together: several processes that were started together are refused; independent: each looks for "
            "itself."
        ),
    )
    balance: Balance = option(
        "equal: ranks compute near-equal parts of each window; speed: parts by how fast each was measured to be, "
        "where ranks differ.",
        default="equal",
        check=_checks.of_balance,
    )
    # As a precision does, it decides the last digits of what is trained.
    compression: Compression = option(
        "none: ranks add up gradients in their own type; bf16: rounded to bfloat16 on their way, half the bytes of "
        "32 bits. One process sends nothing, and rounds nothing.",
        default="none",
        check=_checks.of_compression,
        decides="training",
        accumulator=Own(),
    )
    seed: int = option(
        "of the order of samples, of what datasets draw, and of dropout.",
        default=0,
        check=_checks.of_seed,
        decides="training",
        in_sweeps="shared",
    )
    # How the data are read.
    shuffle: bool = option(
        "read the data in a new order each epoch; a DataLoader says so itself.",
        default=True,
        check=_checks.of_flags,
        decides="training",
    )
    drop_last: bool = option(
        "leave out the short window at the end of an epoch.",
        default=False,
        check=_checks.of_flags,
        decides="training",
    )
    collate_fn: Callable[[list[Any]], Any] | None = option(
        "makes a batch of a list of samples.",
        default=None,
        check=_checks.of_collate_fn,
        probe=Own(),
        in_check=Own(text="makes a batch of a list of samples, where a Dataset is passed."),
        # Of samples, micro-batches are made whose padding is their own.
        accumulator=Own(text="makes a micro-batch of a list of samples; ``step`` is then given a list of samples."),
    )
    # Batches of tensors say themselves how they are cut. It is of use where data are batches of some other form.
    split: SplitLike | None = option(
        "(batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits: samples, "
        "graphs, packed, flattened(...), tensors. Read off the batches when left out.",
        default=None,
        check=split_of,
        probe=Own(),
        accumulator=Own(),
        in_check=Own(),
    )
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = option(
        "the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent there "
        "(others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.",
        default=0,
        check=split_of,
        probe=Own(),
        accumulator=Own(),
        in_check=Own(),
    )
    # Not "training": samples are read under seeds of their own, whichever process reads them.
    num_workers: int = option(
        "processes that read the data ahead of time.",
        default=0,
        check=_checks.of_num_workers,
    )
    # What is looked at beside the training loss. Validations are where trials are compared, so all have the same.
    validation_data: Any = option(
        "like data; its loss is reported at the end of each epoch, and of the run.",
        default=None,
        check=_checks.of_validation,
    )
    # In samples, as budgets of trials are: windows of different sizes are compared after as many.
    validate_every: int | None = option(
        "samples from one validation to the next, instead of epochs.",
        default=None,
        check=_checks.of_validation,
        in_sweeps="shared",
    )
    metrics: Mapping[str, Metric] | None = option(
        'what else validations report, {"accuracy": function}: (outputs, targets) beside loss_fn, (model, batch) '
        "beside training_step, which takes a forward of its own, (outputs, batch) where the model returns its loss -> "
        "a tensor of one value per sample or item (a token that counts), over all of which the mean is taken.",
        default=None,
        check=_checks.of_validation,
    )
    # What outlives the process. Each trial of a sweep has a directory that the sweep finds again after a kill.
    run_dir: str | os.PathLike[str] | None = option(
        "directory for checkpoints and records; the same call again goes on where the last one was killed. On the "
        "command line a new one below runs when left out, and 'none' for no directory.",
        default=None,
        check=_checks.of_run_directory,
        in_sweeps="own",
    )
    checkpoint_every: int | str | None = option(
        'steps, a time such as "30s" or "10m", or "epoch"; ten minutes when left out. One more is written after the '
        "first window, after each validation that is the best so far, and at the end.",
        default=None,
        check=_checks.of_checkpoint_every,
    )
    # Two, so that there is one to go on from should the newest turn out to be unreadable.
    keep_checkpoints: int = option(
        "how many of the newest stay; the best stays besides.",
        default=2,
        check=_checks.of_run_directory,
    )
    resume: Literal["auto"] | bool = option(
        "go on from what run_dir holds, where it holds something (auto), in any case (true), or not (false).",
        default="auto",
        check=_checks.of_run_directory,
        in_sweeps="own",
    )
    # What is reported, and kept for other runs.
    # Off, for it takes at least two micro-batches a window, and reading the gradient between them.
    noise_scale: bool = option("report the gradient noise scale of windows.", default=False, check=_checks.of_flags)
    # What an earlier run found is a first guess, which this run tries before it believes it.
    cache: bool = option(
        "begin from what earlier runs of the same model, data shapes and device found, and keep what this one finds.",
        default=True,
        check=_checks.of_flags,
    )
    callbacks: Iterable[Callback] = option(
        "functions (record) or (record, trainer) -> None, called with every StepReport and event; StopTraining ends "
        "the run. Ready ones are in autoaccum.callbacks; those that have a state_dict are saved with the run.",
        default=(),
        check=_checks.of_callbacks,
        accumulator=Own(
            text="functions (event) -> None, called with every event: a plan, a re-plan, memory that ran out.",
            annotation="Iterable[Callable[[Event], None]]",
            check=_checks.of_event_callbacks,
        ),
    )
    progress: bool = option(
        "show a progress bar and a summary on standard error.", default=True, check=_checks.of_flags
    )

    def check(self) -> Checked:
        """Make the checks that need no more than the arguments.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        """
        return check(OF_FIT, CHECKS, **values_of(self))

    def modules(self) -> list[nn.Module]:
        """Return the model, and the loss or the training step where it is a module too."""
        return modules_of(self.model, self.loss_fn, self.training_step)


def modules_of(model: object, *functions: object) -> list[nn.Module]:
    """Return what a call has that may have parameters to train: its modules, and those that its functions hold.

    The model comes first. A projection head that only the closure of training_step holds is as much a part of what is
    trained as the model: it is moved to the device, saved, and put back when a window is run again.
    """
    named = [module for module in (model, *functions) if isinstance(module, nn.Module)]
    known = {layer for module in named for layer in module.modules()}
    for held in surroundings_of(functions).modules:
        # What holds a known one beside others, as a wrapper that training_step is a method of, is taken apart.
        for layer in held.modules():
            if layer not in known and known.isdisjoint(layer.modules()):
                named.append(layer)
                known.update(layer.modules())
    return named


OF_FIT = arguments_of(FitArguments)
OF_PROBE = arguments_of(FitArguments, "probe")
OF_ACCUMULATOR = arguments_of(FitArguments, "accumulator")
OF_CHECK = arguments_of(FitArguments, "check")
