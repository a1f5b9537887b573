"""Answers to the names that other trainers have: whoever calls ``fit`` by them is told what to pass here."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from autoaccum._units import kind_of, shown
from autoaccum.errors import ArgumentTypeError
from autoaccum.planning import plans
from autoaccum.training.frames import without_own_frames

F = TypeVar("F", bound=Callable[..., Any])

_BATCH = "Use effective_batch (samples per optimizer step)"
_FITS = "Leave it out: effective_batch and the memory decide it (micro_batch sets what is computed at once)"
_DATA = "Use data, the second argument (tensors, a dataset or a DataLoader)"
_SAVING = "Use memory_saving='checkpoint' (left out, it is used where nothing fits otherwise)"
_OFFLOAD = "Use memory_saving='offload' (left out, an accelerator uses it where nothing fits otherwise)"
_LOG = "Use callbacks=[...] with a WandbReporter, MLflowReporter, TensorBoardReporter or CSVReporter of "
_LOG += "autoaccum.reporting, or any function (record); run_dir keeps all records, for `autoaccum report`"
_STOP = "Use callbacks=[autoaccum.callbacks.EarlyStopping(patience=3)] with validation_data"
_BEST = "Use validation_data and run_dir (the best is kept, by its loss or by callbacks=["
_BEST += "autoaccum.callbacks.KeepBest('accuracy', 'max')]); autoaccum.load_best(run_dir, model) reads it"
_OPTIMIZER = "Use optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.1)"
_SCHEDULER = "Use lr_scheduler (a function (optimizer, num_steps) -> scheduler)"
_VALIDATING = (
    "Use validate_every (samples: eval_steps times effective_batch); or leave it out to validate after each epoch"
)
_WATCHING = "Use callbacks=[autoaccum.callbacks.EarlyStopping(metric='accuracy', mode='max')], or "
_WATCHING += "autoaccum.callbacks.KeepBest('accuracy', 'max'), with validation_data and metrics"
_LESS = "Use steps or samples for a shorter run; or torch.utils.data.Subset(dataset, range(1000)) as data"
_TIME = "Use callbacks=[function] ((record) -> None, which raises autoaccum.StopTraining once the time is over)"
_DTYPE = "Use precision='bf16' or 'fp16' (weights keep their type; model.double() changes it)"
_EVALUATING = "Leave it out: validation finds what fits too (max_micro_batch bounds it)"

# By what people mean and not by how they spell it: see ``_plain``.
ELSEWHERE = {
    "batchsize trainbatchsize globalbatchsize perdevicetrainbatchsize pergputrainbatchsize bs": _BATCH,
    "totalbatchsize targetbatchsize totaltrainbatchsize": _BATCH,
    "perdeviceevalbatchsize pergpuevalbatchsize evalbatchsize valbatchsize": _EVALUATING,
    "gradientaccumulationsteps accumulategradbatches accumulationsteps numaccumulationsteps gradaccum": _FITS,
    "accumsteps autofindbatchsize autoscalebatchsize devicetrainmicrobatchsize trainmicrobatchsizepergpu": _FITS,
    "maxepochs numtrainepochs numepochs nepochs nbepochs maxduration": "Use epochs (passes over the data)",
    "maxsteps numsteps totalsteps nsteps maxiters iterations numiterations": "Use steps (optimizer steps)",
    "learningrate baselr": "Use lr",
    "scheduler lrscheduler lrschedulertype schedulers warmup warmupsteps warmupratio": _SCHEDULER,
    "optim optimizers configureoptimizers": "Use optimizer (a function (parameters) -> optimizer, or an optimizer)",
    "weightdecay momentum betas adambeta1 adambeta2 adamepsilon": _OPTIMIZER,
    "criterion loss lossfn lossfunction computeloss": "Use loss_fn(outputs, targets), or training_step(model, batch)",
    "labelsmoothing labelsmoothingfactor": "Use loss_fn=torch.nn.CrossEntropyLoss(label_smoothing=0.1)",
    "computemetrics metric evalmetrics": "Use metrics (a dict of functions by name) with validation_data",
    "logger loggers reportto wandb mlflow tensorboard csvlogger": _LOG,
    "callback": "Use callbacks (a list)",
    "earlystopping earlystoppingpatience": _STOP,
    "monitor greaterisbetter": _WATCHING,
    "ema emadecay useema modelema": "Use callbacks=[autoaccum.callbacks.EMA(decay=0.999)]",
    "reducelronplateau": "Use callbacks=[autoaccum.callbacks.ReduceOnPlateau()] with validation_data",
    "savebest savebestonly loadbestmodelatend metricforbestmodel": _BEST,
    "traindataset traindataloader traindataloaders trainloader dataloader dataset trainset": _DATA,
    "limittrainbatches overfitbatches maxtrainsamples": _LESS,
    "maxtime timelimit": _TIME,
    "droplastbatch dropremainder dataloaderdroplast": "Use drop_last=True",
    "evaldataset valdata valdataset valdataloader valdataloaders valloader testdata": "Use validation_data",
    "evalsteps evalstrategy evaluationstrategy checkvaleverynepoch valcheckinterval": _VALIDATING,
    "maxgradnorm gradientclipval gradclip gradclipnorm clipgradnorm": "Use clip_norm",
    "fp16 bf16 amp mixedprecision useamp": "Use precision='bf16' or 'fp16'",
    "dtype torchdtype": _DTYPE,
    "outputdir defaultrootdir savedir checkpointdir logdir": "Use run_dir (directory for checkpoints and records)",
    "savesteps saveevery savestrategy": "Use checkpoint_every",
    "savetotallimit savetopk keeplast": "Use keep_checkpoints",
    "resumefromcheckpoint ckptpath loadpath": "Use resume=True with the run's run_dir",
    "datacollator collate": "Use collate_fn",
    "tokenizer processingclass": "Use collate_fn (a function (samples) -> batch that tokenizes), or tokenize before",
    "groupbylength": "Leave it out: with a collate_fn each window is sorted by length",
    "modelinit": "Use model=model_init()",
    "dataloadernumworkers workers": "Use num_workers",
    "maxmemory memory memoryfraction gpumemory": "Use memory_limit ('8GiB', or a share such as 0.5)",
    "validationsplit valsplit testsize": "Use torch.utils.data.random_split, and pass validation_data",
    "strategy distributed ddp numnodes worldsize": "Start it with torchrun: its processes train together",
    "accelerator devices usecpu": "Use device (torchrun starts several ranks)",
    "gradientcheckpointing activationcheckpointing usegradientcheckpointing": _SAVING,
    "offload cpuoffload offloadactivations activationoffload activationoffloading saveoncpu": _OFFLOAD,
    "offloadoptimizer optimizeroffload offloadoptimizerdevice offloadparam": _OFFLOAD,
    "ntrials trials": "Call autoaccum.sweep(recipe, num_trials=20), or autoaccum sweep --trials 20",
    "deterministic": "Use torch.use_deterministic_algorithms(True) before the call; seed sets what is drawn",
    "loggingsteps logeverynsteps logsteps logevery": "Leave it out: callbacks get every window's record",
    "verbose enableprogressbar disabletqdm": "Use progress=True or progress=False",
}
"""What is called otherwise elsewhere, without its punctuation, and what to do here."""

_COMPARES = "Leave it out: a loss that compares samples is that of the full batch by default (accumulate='auto')."
_GONE = {
    "before_window": "Compute it in the step (training_step or loss_fn), which runs once on the full batch where that "
    "is needed: see accumulate=.",
    "loss_scope": _COMPARES,
    "embed": _COMPARES,
}
"""What to do in the place of arguments that there were."""

_IN_A_LOOP = {
    "effective_batch": "Use DataLoader(data, batch_size={}): step(batch) takes all samples of one optimizer step.",
    "lr_scheduler": "Call scheduler.step() after accumulator.step(batch).",
}
"""What a loop of the user's own does for arguments that an Accumulator does not have."""

_OF_A_CALLBACK = {
    "monitor": "Use metric ('loss', or the name of one of the run's metrics)",
    "metricforbestmodel": "Use metric ('loss', or the name of one of the run's metrics)",
    "greaterisbetter": "Use mode='max' where higher is better, mode='min' where lower is",
    "threshold earlystoppingthreshold": "Use min_delta",
    "earlystoppingpatience": "Use patience (validations)",
}
"""What a callback's arguments are called elsewhere."""

_MISSING = {
    "effective_batch": "Pass effective_batch=64, say: samples per optimizer step.",
    "data": "Pass tensors, a dataset or a DataLoader as the second argument.",
    "mode": "Pass mode='max' where higher is better, mode='min' where lower is. The lowest loss needs no KeepBest.",
}
"""What to pass where an argument that has no default is left out."""


_PASSES = ("evaluate", "predict")

# Classes that hold a training loop or a part of one of their own. By name, for none of them is imported for this.
_LIGHTNING = "Pass callbacks=[AutoAccum(effective_batch)] of autoaccum.integrations.lightning to Lightning's Trainer; "
_LIGHTNING += (
    "or, here, training_step=lambda model, batch: model.training_step(batch, 0) and optimizer=, the one of its "
)
_LIGHTNING += "configure_optimizers()"
_LIGHTNING_TRAINER = "Let it train, with callbacks=[AutoAccum(effective_batch)] of autoaccum.integrations.lightning; "
_LIGHTNING_TRAINER += "or pass the module that it would train, and its training_step"
_TRAINER = "Make it an AutoAccumTrainer of autoaccum.integrations.transformers, which takes effective_batch, and train "
_TRAINER += "by it; or pass trainer.model, trainer.train_dataset and collate_fn=trainer.data_collator"
_OTHERS = {
    ("lightning", "pytorch_lightning"): {
        "LightningModule": _LIGHTNING,
        "Trainer": _LIGHTNING_TRAINER,
        "LightningDataModule": "Pass the module first, and datamodule.train_dataloader() second",
    },
    ("transformers", "trl", "sentence_transformers"): {
        "Trainer": _TRAINER,
    },
    ("accelerate",): {"Accelerator": "Pass the model; no Accelerator is needed"},
}


def answering(name: str) -> Callable[[F], F]:
    """Make a decorator of functions that answers arguments that they do not have.

    Args:
        name: of the function, as users call it.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [each for each, parameter in signature.parameters.items() if parameter.kind in kinds]
        # Whose loss is in the model, or is none, takes a LightningModule as it takes any other.
        has_loss = "training_step" in signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                # Before Python itself says that effective_batch is missing, which would hide the better answer.
                if argument not in signature.parameters:
                    cure = _cure(argument, name, list(signature.parameters)).replace("{}", shown(kwargs[argument]))
                    raise unknown_argument(name, argument, kwargs[argument], cure)
            # As elsewhere one writes fit(model, inputs, targets).
            if len(args) > len(positional):
                takes_data = "data" in positional
                named = [f"{each}=..." for each in signature.parameters if each not in ("self", *positional)]
                cure = f"Pass it by its name: {', '.join(named[:3])}{' and so on' if named[3:] else ''}."
                if takes_data:
                    cure = f"Pass inputs and targets as one argument: {name}(model, data=(inputs, targets), ...)."
                own = [each for each in positional if each != "self"]
                given, place = kind_of(args[len(positional)]), len(own) + 1
                fact = f"{name}() takes {' and '.join(own)} without a name, and argument {place} is {given}."
                raise ArgumentTypeError(f"argument {place}", given, "its name", cure, fact=fact)
            for argument, parameter in signature.parameters.items():
                is_there = argument in kwargs or argument in positional[: len(args)]
                if parameter.default is inspect.Parameter.empty and not is_there:
                    fact = f"{name}() needs {argument}, which has no default."
                    raise ArgumentTypeError(argument, None, "a value", _MISSING.get(argument, ""), fact=fact)
            model = kwargs["model"] if "model" in kwargs else next((arg for arg in args if _answer_to(arg)), None)
            # With a step of the caller's own a LightningModule is a module like any other.
            is_alone = has_loss and kwargs.get("training_step") is None and kwargs.get("loss_fn") is None
            if is_alone and (cure := _answer_to(model)):
                raise ArgumentTypeError("model", type(model).__name__, "a module and its loss", f"{cure}.")
            return function(*args, **kwargs)

        return cast(F, without_own_frames(call))

    return decorate


def of_one_batch(method: F) -> F:
    """Make a method (batch) answer to those who call it with inputs and targets, or with nothing.

    Raises:
        ArgumentTypeError: it is called with anything but one batch; it says how to pass that.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        # As it is meant: a window may take no more than 100 µs, so that nothing else is looked at.
        if len(given) == 1 and not named:
            return method(self, given[0])
        if not given and named.keys() == {"batch"}:
            return method(self, named["batch"])
        cure = f"Pass inputs and targets as a tuple: {name}((inputs, targets))."
        if named:
            cure = f"Pass what the model takes by name as a dict: {name}({{'input_ids': ..., 'labels': ...}})."
        elif not given:
            cure = "Pass all samples of a step; after backward(batch) call optimizer.step()."
        found = ", ".join([type(value).__name__ for value in given] + [f"{key}=..." for key in named]) or "nothing"
        raise ArgumentTypeError("batch", found, "one batch", cure, fact=f"{name}() takes one batch, and got {found}.")

    return cast(F, without_own_frames(call))


def unknown_argument(name: str, argument: str, value: object, cure: str) -> ArgumentTypeError:
    """Return the error for an argument that a function does not have."""
    fact = f"{name}() has no argument {argument!r}."
    return ArgumentTypeError(argument, value, f"an argument of {name}", cure, fact=fact)


def _cure(argument: str, name: str, parameters: list[str]) -> str:
    """Return what to pass to a function in the place of an argument that it does not have."""
    in_a_loop = _IN_A_LOOP if name == "Accumulator" else {}
    if "metric" in parameters and (cure := _found(argument, _OF_A_CALLBACK)):
        return cure
    if cure := elsewhere(argument):
        if cure.startswith(_FITS) and "effective_batch" not in parameters:
            return "Leave it out: autoaccum finds how many samples fit at once."
        # An Accumulator has no effective batch, say: whoever passed it next would be told so.
        meant = meant_in(cure)
        # Arithmetic, which finds out nothing.
        if name == "plan":
            return "Use effective_batch (samples per step) and max_micro_batch (samples that fit at once)."
        # What fits is found out there as in training, and is bounded likewise.
        if name in _PASSES and meant == "effective_batch":
            return f"Leave it out: {name}() finds what fits (max_micro_batch bounds it)."
        if not meant or meant in parameters:
            return cure
        return in_a_loop.get(meant) or f"Leave it out (fit() has {meant} for it)."
    return in_a_loop.get(argument) or meant_by(argument, parameters)


def meant_by(argument: str, parameters: Iterable[str]) -> str:
    """Return which parameter may have been meant by a name that none has; empty where none is like it."""
    # Two letters of three have to be right, or it is no help.
    spelt = {_plain(parameter): parameter for parameter in parameters}
    near = difflib.get_close_matches(_plain(argument), spelt, 1, cutoff=0.7)
    return f"Did you mean {spelt[near[0]]}?" if near else ""


def meant_in(cure: str) -> str:
    """Return the argument that a cure of ``elsewhere`` names; empty where it names none.

    >>> meant_in("Use effective_batch (samples per optimizer step)."), meant_in("Use torch.compile.")
    ('effective_batch', '')
    """
    found = re.match(r"Use (\w+)\b(?!\.\w)", cure)
    return found[1] if found else ""


def elsewhere(name: str) -> str:
    """Return what to do in the place of an argument of other trainers, or of one that is gone; empty for others."""
    return _GONE.get(name) or _found(name, ELSEWHERE)


def _found(name: str, cures: Mapping[str, str]) -> str:
    plain = _plain(name)
    return next((f"{cure}." for names, cure in cures.items() if plain in names.split()), "")


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _answer_to(thing: object) -> str:
    """Return what to pass in the place of an object that trains, or is trained, by itself; empty where it is none."""
    for kind in type(thing).__mro__:
        for modules, classes in _OTHERS.items():
            if kind.__module__.split(".")[0] in modules and kind.__name__ in classes:
                return classes[kind.__name__]
    return ""


plan = answering("plan")(plans.plan)
"""The plan of an effective batch, as ``planning.plans`` has it, for those who call its arguments otherwise too."""
plan.__module__ = __name__  # pickled by the name that it is found by
