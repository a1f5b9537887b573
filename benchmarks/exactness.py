"""How far the gradient that reaches the optimizer is from that of big-batch training: autoaccum, peers, recipes.

    python benchmarks/exactness.py [--only TEXT]

Each case of exactness_cases.py is trained for one epoch: full windows and a short last one. Every window's gradient is
compared with that of one forward and backward over the whole window, at the same parameters (the optimizer only
records) and in the same dtype; a figure is ||g - g_big|| / ||g_big|| of the worst window. autoaccum cuts windows into
unequal micro-batches of at most 5 samples, the others into micro-batches of 4, as their data loaders do.

Writes the table to benchmarks/results/exactness.md and docs/exactness.md. The exit status is 1 if autoaccum is not
exact: 1e-12 in float64, 1e-5 in float32, or the bound of the case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from exactness_cases import CASES, EFFECTIVE_BATCH, Batch, Case, Work
from results import COMMITTED, RESULTS, write_table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.events import StepSkipped

MICRO_BATCH = 4
STEPS = EFFECTIVE_BATCH // MICRO_BATCH
UNEQUAL = ((5, 4, 3), (2, 5, 1, 4))
"""Plans of the full windows; a short one is cut into one sample and the rest."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
FLOAT16_SCALE = 2.0**16
NOT_MEASURED = ""
DOCS = Path(__file__).parent.parent / "docs" / "exactness.md"
BEGIN, END = "<!-- table: written by benchmarks/exactness.py -->\n", "<!-- end of table -->\n"

Gradients = list[torch.Tensor | None]
"""One per window; None: no step was taken."""


class Recorder(torch.optim.Optimizer):
    """Remembers the gradient of each step as one vector, and changes nothing: all windows see the same parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.0})
        self.gradients: Gradients = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:  # Lightning's forward and backward are in there
            with torch.enable_grad():
                loss = closure()
        self.gradients.append(torch.cat([_flat(p) for group in self.param_groups for p in group["params"]]))
        return loss


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """Without elements where there is no gradient: zeros instead would let an optimizer decay an unused parameter."""
    if parameter.grad is None:
        return torch.empty(0, dtype=parameter.real.dtype)
    gradient = parameter.grad.detach()
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten().clone()


def recorder(work: Work) -> Recorder:
    return Recorder(work.groups or work.model.parameters())


def rows(data: Batch, start: int, stop: int) -> Batch:
    if isinstance(data, dict):
        return {name: column[start:stop] for name, column in data.items()}
    return tuple(column[start:stop] for column in data)


def length(data: Batch) -> int:
    return len(next(iter(data.values())) if isinstance(data, dict) else data[0])


def clip(case: Case, work: Work) -> None:
    if case.clip_norm is not None:
        nn.utils.clip_grad_norm_(work.model.parameters(), case.clip_norm)


# Big-batch training, which all are compared with


def big_batch(case: Case, work: Work) -> Gradients:
    optimizer = recorder(work)
    autocast = {"fp32": contextlib.nullcontext, "bf16": _autocast(torch.bfloat16), "fp16": _autocast(torch.float16)}
    scale = FLOAT16_SCALE if case.precision == "fp16" else 1.0
    for start in range(0, length(work.data), EFFECTIVE_BATCH):
        optimizer.zero_grad()
        with autocast[case.precision]():
            loss = work.loss(rows(work.data, start, start + EFFECTIVE_BATCH))
        if not math.isfinite(loss.item()):  # a mean over nothing: there is nothing to step on
            optimizer.gradients.append(None)
            continue
        (loss * scale).backward()
        for parameter in work.model.parameters():
            if scale != 1.0 and parameter.grad is not None:
                parameter.grad /= scale
        clip(case, work)
        optimizer.step()
    return optimizer.gradients


def _autocast(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype)


# The contestants


def by_autoaccum(case: Case, work: Work) -> Gradients:
    samples = length(work.data)
    full, short = divmod(samples, EFFECTIVE_BATCH)
    plans = [UNEQUAL[window % len(UNEQUAL)] for window in range(full)] + [(1, short - 1)] * (short > 0)
    result = autoaccum.fit(
        work.model,
        work.data,
        effective_batch=EFFECTIVE_BATCH,
        micro_batch=plans,
        loss_fn=work.loss_fn,
        training_step=work.training_step,
        num_items=work.num_items,
        optimizer=recorder(work),
        clip_norm=case.clip_norm,
        precision=case.precision,
        shuffle=False,
        progress=False,
        device="cpu",
    )
    assert [report.micro_batches for report in result.history] == plans
    assert isinstance(result.optimizer, Recorder)
    recorded = iter(result.optimizer.gradients)
    skipped = {event.step for event in result.events if isinstance(event, StepSkipped)}
    return [None if report.step in skipped else next(recorded) for report in result.history]


def recipe(
    *, divide: bool = True, zero: bool = True, step_at_end: bool = True, backward_once: bool = False
) -> Callable[[Case, Work], Gradients]:
    """The loop that tutorials teach, and its usual slips."""

    def train(case: Case, work: Work) -> Gradients:
        optimizer = recorder(work)
        starts = range(0, length(work.data), MICRO_BATCH)
        losses = []
        for index, start in enumerate(starts, 1):
            loss = work.loss(rows(work.data, start, start + MICRO_BATCH))
            losses.append(loss)
            if not backward_once:
                (loss / STEPS if divide else loss).backward()
            if index % STEPS == 0 or (step_at_end and index == len(starts)):
                if backward_once:
                    (sum(losses) / len(losses)).backward()
                losses.clear()
                clip(case, work)
                optimizer.step()
                if zero:
                    optimizer.zero_grad()
        return optimizer.gradients

    return train


def loader(work: Work) -> DataLoader[Any]:
    data: Any = work.data
    if isinstance(data, dict):
        data = [{name: column[row] for name, column in data.items()} for row in range(length(data))]
    else:
        data = TensorDataset(*data)
    return DataLoader(data, batch_size=MICRO_BATCH)


def by_accelerate(case: Case, work: Work) -> Gradients:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    recording = recorder(work)
    work.model, optimizer, batches = accelerator.prepare(work.model, recording, loader(work))
    for batch in batches:
        with accelerator.accumulate(work.model):
            accelerator.backward(work.loss(batch))
            if accelerator.sync_gradients and case.clip_norm is not None:
                accelerator.clip_grad_norm_(work.model.parameters(), case.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return recording.gradients


def by_accelerate_counting(case: Case, work: Work) -> Gradients | None:
    """The loop that Accelerate's guide shows for samples of variable size: the user sums and counts."""
    from accelerate import Accelerator

    if work.sum_and_count is None:
        return None
    total, count = work.sum_and_count
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    recording = recorder(work)
    work.model, optimizer, batches = accelerator.prepare(work.model, recording, loader(work))
    iterator = iter(batches)
    for window in range(math.ceil(len(batches) / STEPS)):
        held = [next(iterator) for _ in range(min(STEPS, len(batches) - window * STEPS))]
        num_items = sum(count(batch) for batch in held)
        for batch in held:
            accelerator.backward(total(work.model, batch) * STEPS / num_items)
        if case.clip_norm is not None:
            accelerator.clip_grad_norm_(work.model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return recording.gradients


def by_lightning(case: Case, work: Work) -> Gradients:
    import lightning

    recording = recorder(work)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return work.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return recording

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=STEPS,
            gradient_clip_val=case.clip_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), loader(work))
    return recording.gradients


class WithLoss(nn.Module):
    """A model for the Transformers Trainer, which wants one that takes labels and returns its loss."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = work.model
        self._loss = work.loss

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return {"loss": self._loss((inputs, labels) if weights is None else (inputs, labels, weights))}


def by_transformers(case: Case, work: Work) -> Gradients:
    from transformers import Trainer, TrainingArguments

    optimizer = recorder(work)
    columns = work.data
    if not isinstance(columns, dict):
        columns = dict(zip(("inputs", "labels", "weights"), columns, strict=False))
    data: Any = [{name: column[row] for name, column in columns.items()} for row in range(length(columns))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=case.clip_norm or 0.0,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            work.model if isinstance(work.data, dict) else WithLoss(work),
            arguments,
            train_dataset=data,
            data_collator=default_collate,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )
        trainer.train()
    return optimizer.gradients


CONTESTANTS: dict[str, Callable[[Case, Work], Gradients | None]] = {
    "divide by steps": recipe(step_at_end=False),
    "divide, step at the end": recipe(),
    "backward once": recipe(backward_once=True),
    "forget to zero": recipe(zero=False),
    "forget to divide": recipe(divide=False),
    "Accelerate": by_accelerate,
    "Accelerate, counting": by_accelerate_counting,
    "Lightning": by_lightning,
    "Transformers": by_transformers,
}


# The figures


def measure(case: Case, dtype: torch.dtype, train: Callable[[Case, Work], Gradients | None]) -> tuple[float, str]:
    """(worst relative error, what the table says); infinite where a window has no right gradient at all."""
    with _quiet(), _float64_kept(dtype):
        expected = big_batch(case, case.make(dtype))
        try:
            found = train(case, case.make(dtype))
        except ImportError as error:
            return math.inf, f"not installed: {error.name}"
        except AutoaccumError as error:
            return math.inf, f"refuses: {type(error).__name__}"
        except Exception as error:
            return math.inf, f"crashes: {type(error).__name__}"
    return (math.inf, NOT_MEASURED) if found is None else compare(found, expected)


def compare(found: Gradients, expected: Gradients) -> tuple[float, str]:
    assert len(found) <= len(expected)
    lost = len(expected) - len(found)
    worst, remarks, wrong = 0.0, [], lost > 0
    for got, want in zip(found, expected, strict=False):
        if got is not None and not got.isfinite().all():
            return math.inf, "NaN"
        if want is None or got is None:
            remarks.append("no step" if got is None else "steps on nothing")
            wrong |= want is not got
        elif got.shape != want.shape:
            remarks.append("other parameters")
            wrong = True
        else:
            worst = max(worst, float((got - want).norm() / want.norm()))
    if lost:
        remarks.append("last window lost")
    return math.inf if wrong else worst, ", ".join([number(worst), *remarks])


def number(error: float) -> str:
    if error == 0:
        return "0"
    return f"{error:.0e}" if error < 0.01 else f"{error:.2f}" if error < 10 else f"{error:.0f}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _float64_kept(dtype: torch.dtype) -> Iterator[None]:
    """Hugging Face's losses begin with logits.float(), which rounds float64 *down*: not here, for any contestant."""
    to_float32 = torch.Tensor.float

    def keep(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float32(tensor, *args, **options)

    with mock.patch.object(torch.Tensor, "float", keep) if dtype == torch.float64 else contextlib.nullcontext():
        yield


def row_of(case: Case) -> tuple[list[str], list[str]]:
    """(cells of the table, in what autoaccum is not exact)"""
    cells, failures = [case.name], []
    try:
        case.make(torch.float32)
    except ImportError as error:  # a Hugging Face model without transformers
        return [case.name, *[f"not installed: {error.name}"] * (len(BOUNDS) + len(CONTESTANTS))], []
    for dtype, bound in BOUNDS.items():
        if case.bound is not None and dtype == torch.float64:  # autocast is for float32
            cells.append(NOT_MEASURED)
            continue
        error, text = measure(case, dtype, by_autoaccum)
        cells.append(text)
        if not error < (case.bound or bound):
            failures.append(f"{case.name}: {text} in {dtype}, not below {case.bound or bound:g}")
    cells += [measure(case, torch.float64, train)[1] if case.peers else NOT_MEASURED for train in CONTESTANTS.values()]
    return cells, failures


def versions() -> str:
    found = []
    for peer in ("accelerate", "lightning", "transformers"):
        try:
            found.append(f"{peer} {importlib.metadata.version(peer)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{peer} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the cases whose name contains this; nothing is written")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    table, failures = [], []
    for case in CASES:
        if options.only in case.name:
            cells, failed = row_of(case)
            table.append(cells)
            failures += failed
            print(*cells, sep=" | ", file=sys.stderr)
    if not options.only:
        page = write_table(
            "exactness",
            f"Relative error of the gradient beside the big batch's, worst of an epoch's windows. Peers: {versions()}.",
            ["loss", "autoaccum", "autoaccum float32", *CONTESTANTS],
            table,
        )
        if RESULTS == COMMITTED:
            before, rest = DOCS.read_text().split(BEGIN)
            DOCS.write_text(f"{before}{BEGIN}\n{page}\n{END}{rest.split(END)[1]}")
    if failures:
        raise SystemExit("autoaccum is not exact:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
