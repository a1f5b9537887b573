"""The same task as each peer wants it, and a device memory on which all of them recognise an out-of-memory error.

Imports of peers are in the functions: a process loads only the one that it runs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from autoaccum.memory.simulated import MemorySimulation

LR = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every contestant trains."""

    make_model: Callable[[], nn.Module]
    """Always with the same weights."""
    inputs: Tensor
    """(samples, ...)."""
    targets: Tensor
    """(samples, ...)."""
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    shuffle: bool = True
    device: str = "cpu"
    """Where it is trained; the data lie on the host."""


class Device(MemorySimulation):
    """A simulated memory whose errors are worded as CUDA's, and counted.

    Accelerate knows the words of ``autoaccum.testing`` too (" out of memory."); Lightning wants "CUDA" in them.
    """

    def __init__(self, limit_bytes: int = 2**40) -> None:
        super().__init__(limit_bytes)
        self.ooms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.ooms += 1
            error.args = (str(error).replace("Simulated device", "CUDA"),)
            raise


class Rows(Dataset[Any]):
    """The task's samples, taken a batch at a time: no peer pays for collating them one by one."""

    def __init__(self, task: Task, names: tuple[str, str] | None = None) -> None:
        self._task = task
        self._names = names

    def __len__(self) -> int:
        return len(self._task.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        batch = self._task.inputs[indices], self._task.targets[indices]
        return batch if self._names is None else dict(zip(self._names, batch, strict=True))


def as_it_is(batch: Any) -> Any:
    return batch


def loader_of(task: Task, batch_size: int) -> DataLoader[Any]:
    return DataLoader(Rows(task), batch_size=batch_size, shuffle=task.shuffle, collate_fn=as_it_is)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def silence() -> None:
    """Peers that talk on the way."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def lightning_module(task: Task, model: nn.Module, batch_size: int) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.batch_size = batch_size  # what the batch size finder sets

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, targets = batch
            return task.loss_fn(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

        def train_dataloader(self) -> DataLoader[Any]:
            return loader_of(task, self.batch_size)

    return Module()


def lightning_trainer(folder: str, device: str = "cpu", **options: Any) -> Any:
    """Without logs, checkpoints, bars and summaries."""
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu" if device == "cpu" else "auto",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def compute_twice(model: nn.Module, every: int = 1) -> None:
    """Have each of the model's blocks, or each so-manieth, compute its forward once more in backward; none for 0."""
    for block in list(model.blocks)[::every] if every else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class WithLoss(nn.Module):
    """A model as Transformers wants it: it returns its loss."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = task.loss_fn

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self._loss_fn(self.model(inputs), labels)}

    def activation_checkpointing_enable(self, **_: Any) -> None:
        # What its trainer calls where it is asked to.
        compute_twice(self.model)


def transformers_trainer(
    task: Task, model: nn.Module, folder: str, batch_size: int, attempts: list[int], **options: Any
) -> Any:
    """Without logs, checkpoints and bars; ``attempts`` gets each batch size that its training loop begins with."""
    import transformers

    class Trainer(transformers.Trainer):
        def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
            attempts.append(batch_size or self._train_batch_size)
            return super()._inner_training_loop(batch_size, *args, **kwargs)

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,  # AdamW's own
        max_grad_norm=0,  # no clipping
        optim="adamw_torch_fused",
        use_cpu=task.device == "cpu",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        train_sampling_strategy="random" if task.shuffle else "sequential",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=WithLoss(task, model),
        args=arguments,
        train_dataset=Rows(task, ("inputs", "labels")),
        data_collator=as_it_is,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer
