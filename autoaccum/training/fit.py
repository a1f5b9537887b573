"""``fit``: the function, which is ``Trainer(...).fit()``, and what it says of its arguments."""

from __future__ import annotations

from typing import Any

from autoaccum.training.declarations import taking
from autoaccum.training.options import FitArguments
from autoaccum.training.result import FitResult
from autoaccum.training.synonyms import answering
from autoaccum.training.trainer import Trainer


@answering("fit")
@taking(FitArguments)
def fit(*args: Any, **kwargs: Any) -> FitResult:
    """Train ``model`` with exactly ``effective_batch`` samples per optimizer step, in whatever memory there is.

    ::

        for epoch in epochs:
            for window in windows of effective_batch samples:       # the last one of an epoch may be short
                remember buffers and random states
                for micro_batch in plan:                            # found while training; sums to the window
                    loss = loss_fn(model(inputs), targets)          # a mean over the micro-batch's items
                    (loss * items / items of the window).backward()
                out of memory anywhere above: put everything back, plan smaller, run the window again
                clip; optimizer.step(); lr_scheduler.step(); report
            validate

    Args:
        model: the module to train, in place.
        data: a Dataset, a DataLoader (its dataset, collate_fn, workers and sampler are used, its batch size is not), a
            tuple or dict of tensors with one row per sample, or any iterable of batches. A batch is any pytree whose
            tensors have one row per sample.
        effective_batch: samples per optimizer step; or a schedule, its text such as "64, 1000:256", or a function
            (Progress) -> samples: see autoaccum.schedules.
        loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a
            dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
        training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
            neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
        num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss; of
            several losses a dict of these by their names, or a list.
        reduction: mean or sum: how the loss of a micro-batch combines its samples or items; measured if left out. With
            num_items, a sum is divided by the items of the full batch.
        optimizer: an Optimizer or a function (parameters) -> Optimizer; AdamW when left out.
        lr: learning rate of the AdamW that is made when optimizer is left out; 1e-3 when left out too.
        lr_scheduler: function (optimizer, num_steps) -> LRScheduler; stepped once per window. Where only training
            tells how many windows there are it needs a budget in steps.
        lr_scaling: none, linear or sqrt: lr times effective_batch / base_batch, or its root.
        base_batch: effective batch that lr is right for.
        epochs: passes over the data; one when no budget is given.
        steps: optimizer steps, over as many epochs as that takes.
        samples: samples to train on; the last window is cut to it.
        micro_batch: "auto", the samples of one forward and backward, or the plans of a recorded run
            ([report.micro_batches for report in history]) to repeat it bit for bit: on an accelerator with
            torch.use_deterministic_algorithms(True), and on CUDA CUBLAS_WORKSPACE_CONFIG=:4096:8.
        max_micro_batch: the most samples to try at once.
        min_micro_batch: the fewest samples of one forward and backward; a window that has fewer is run as one
            micro-batch.
        memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one
            of these, asked again as training goes on.
        headroom: fraction of the limit that plans leave free, but for the smallest micro-batch.
        memory_saving: auto: where not even the smallest micro-batch fits, blocks compute their forward twice
            (checkpoint), then tensors go to the host (offload), to the same bits; off: never; one of these, or both:
            always.
        patience: seconds to wait for memory that others hold where not even the smallest micro-batch fits beside it.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        clip_norm: clip each window's gradient to this 2-norm.
        accumulate: how micro-batches make the gradient: weighted: by what their losses count; joined: the loss is
            computed once, on the outputs of all of them, which run again in backward; auto: joined where weighted is
            not exact.
        verify: measure, on a few samples of the first window that is cut and now and then, that cut windows have the
            gradient of whole ones.
        strict: raise NotExactError before a step on a gradient that was measured not to be the whole window's, or could
            not be measured, instead of saying so.
        compile: run the model through torch.compile.
        device: where to train, such as cpu or cuda:1; an accelerator where there is one.
        ranks: together: the processes that torchrun has started share each window, and train one model; independent:
            each process that a launcher has started trains by itself.
        balance: equal: ranks compute near-equal parts of each window; speed: parts by how fast each was measured to be,
            where ranks differ.
        compression: none: ranks add up gradients in their own type; bf16: rounded to bfloat16 on their way, half the
            bytes of 32 bits. One process sends nothing, and rounds nothing.
        seed: of the order of samples, of what datasets draw, and of dropout.
        shuffle: read the data in a new order each epoch; a DataLoader says so itself.
        drop_last: leave out the short window at the end of an epoch.
        collate_fn: makes a batch of a list of samples.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits: samples,
            graphs, packed, flattened(...), tensors. Read off the batches when left out.
        batch_dim: the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent there
            (others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.
        num_workers: processes that read the data ahead of time.
        validation_data: like data; its loss is reported at the end of each epoch, and of the run.
        validate_every: samples from one validation to the next, instead of epochs.
        metrics: what else validations report, {"accuracy": function}: (outputs, targets) beside loss_fn, (model, batch)
            beside training_step, which takes a forward of its own, (outputs, batch) where the model returns its loss ->
            a tensor of one value per sample or item (a token that counts), over all of which the mean is taken.
        run_dir: directory for checkpoints and records; the same call again goes on where the last one was killed. On
            the command line a new one below runs when left out, and 'none' for no directory.
        checkpoint_every: steps, a time such as "30s" or "10m", or "epoch"; ten minutes when left out. One more is
            written after the first window, after each validation that is the best so far, and at the end.
        keep_checkpoints: how many of the newest stay; the best stays besides.
        resume: go on from what run_dir holds, where it holds something (auto), in any case (true), or not (false).
        noise_scale: report the gradient noise scale of windows.
        cache: begin from what earlier runs of the same model, data shapes and device found, and keep what this one
            finds.
        callbacks: functions (record) or (record, trainer) -> None, called with every StepReport and event; StopTraining
            ends the run. Ready ones are in autoaccum.callbacks; those that have a state_dict are saved with the run.
        progress: show a progress bar and a summary on standard error.

    Returns:
        FitResult: history, events, plan, num_steps, num_samples, model, optimizer.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        DataError: the data cannot be cut into windows.
        LossError: the loss cannot be trained on; no step was taken.
        MemoryLimitError: not even one sample fits, or not even the model.

    >>> import torch
    >>> inputs, targets = torch.randn(10, 3), torch.randn(10, 1)
    >>> result = fit(
    ...     torch.nn.Linear(3, 1), (inputs, targets), effective_batch=4, micro_batch=3,
    ...     loss_fn=torch.nn.functional.mse_loss, device="cpu", progress=False,
    ... )
    >>> [report.micro_batches for report in result.history]
    [(2, 2), (2, 2), (2,)]
    """
    return Trainer(*args, **kwargs).fit()
