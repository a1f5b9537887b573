"""Answers to the names that other trainers have: whoever calls ``fit`` by them is told what to pass here."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from autoaccum._units import kind_of
from autoaccum.errors import ArgumentTypeError
from autoaccum.planning import plans
from autoaccum.training.frames import without_own_frames

F = TypeVar("F", bound=Callable[..., Any])

_BATCH = "Pass effective_batch, the samples of an optimizer step; how many of them fit at once is found out"
_FITS = "Leave it out: it follows from effective_batch and from what fits; micro_batch sets what is computed at once"
_DATA = "Pass the data as the second argument: tensors, a dataset or a DataLoader"
_SAVING = "Pass memory_saving='checkpoint'; left out, it is done where nothing fits otherwise"
_OFFLOAD = "Pass memory_saving='offload'; left out, it is done on an accelerator where nothing fits otherwise"
_LOG = "Pass callbacks=[...] with a WandbReporter, MLflowReporter, TensorBoardReporter or CSVReporter of "
_LOG += "autoaccum.reporting, or any function (record); run_dir keeps all records, for `autoaccum report`"
_STOP = "Pass callbacks=[autoaccum.callbacks.EarlyStopping(patience=3)] beside validation_data"
_BEST = "Pass validation_data and run_dir: the best is kept, by its loss or by what callbacks=["
_BEST += "autoaccum.callbacks.KeepBest('accuracy', 'max')] names, and autoaccum.load_best(run_dir, model) reads it"
_OPTIMIZER = "Pass optimizer, such as lambda params: torch.optim.AdamW(params, weight_decay=0.1)"
_SCHEDULER = "Pass lr_scheduler, (optimizer, num_steps) -> scheduler"
_VALIDATING = "Pass validate_every, in samples: eval_steps times effective_batch; or leave it out, for each epoch's "
_VALIDATING += "end is the default"
_WATCHING = "Pass callbacks=[autoaccum.callbacks.EarlyStopping(metric='accuracy', mode='max')], or "
_WATCHING += "autoaccum.callbacks.KeepBest('accuracy', 'max'), beside validation_data and metrics"
_LESS = "Pass steps, or samples, for a shorter run; or torch.utils.data.Subset(dataset, range(1000)) as data"
_TIME = "Pass callbacks=[function], (record) -> None, that raises autoaccum.StopTraining once the time is over"
_DTYPE = "Pass precision='bf16' or 'fp16'; the model's weights stay of the type that they are of, model.double() say"
_EVALUATING = "Leave it out: what fits at once is found out for validations too, and max_micro_batch bounds it"

# By what people mean and not by how they spell it: see ``_plain``.
ELSEWHERE = {
    "batchsize trainbatchsize globalbatchsize perdevicetrainbatchsize pergputrainbatchsize bs": _BATCH,
    "totalbatchsize targetbatchsize totaltrainbatchsize": _BATCH,
    "perdeviceevalbatchsize pergpuevalbatchsize evalbatchsize valbatchsize": _EVALUATING,
    "gradientaccumulationsteps accumulategradbatches accumulationsteps numaccumulationsteps gradaccum": _FITS,
    "accumsteps autofindbatchsize autoscalebatchsize devicetrainmicrobatchsize trainmicrobatchsizepergpu": _FITS,
    "maxepochs numtrainepochs numepochs nepochs nbepochs maxduration": "Pass epochs",
    "maxsteps numsteps totalsteps nsteps maxiters iterations numiterations": "Pass steps, of the optimizer",
    "learningrate baselr": "Pass lr",
    "scheduler lrscheduler lrschedulertype schedulers warmup warmupsteps warmupratio": _SCHEDULER,
    "optim optimizers configureoptimizers": "Pass optimizer, (parameters) -> optimizer, or one that is made",
    "weightdecay momentum betas adambeta1 adambeta2 adamepsilon": _OPTIMIZER,
    "criterion loss lossfn lossfunction computeloss": "Pass loss_fn(outputs, targets), or training_step(model, batch)",
    "labelsmoothing labelsmoothingfactor": "Pass loss_fn=torch.nn.CrossEntropyLoss(label_smoothing=0.1)",
    "computemetrics metric evalmetrics": "Pass metrics, by their names, and validation_data",
    "logger loggers reportto wandb mlflow tensorboard csvlogger": _LOG,
    "callback": "Pass callbacks, a list",
    "earlystopping earlystoppingpatience": _STOP,
    "monitor greaterisbetter": _WATCHING,
    "ema emadecay useema modelema": "Pass callbacks=[autoaccum.callbacks.EMA(decay=0.999)]",
    "reducelronplateau": "Pass callbacks=[autoaccum.callbacks.ReduceOnPlateau()] beside validation_data",
    "savebest savebestonly loadbestmodelatend metricforbestmodel": _BEST,
    "traindataset traindataloader traindataloaders trainloader dataloader dataset trainset": _DATA,
    "limittrainbatches overfitbatches maxtrainsamples": _LESS,
    "maxtime timelimit": _TIME,
    "droplastbatch dropremainder dataloaderdroplast": "Pass drop_last=True",
    "evaldataset valdata valdataset valdataloader valdataloaders valloader testdata": "Pass validation_data",
    "evalsteps evalstrategy evaluationstrategy checkvaleverynepoch valcheckinterval": _VALIDATING,
    "maxgradnorm gradientclipval gradclip gradclipnorm clipgradnorm": "Pass clip_norm",
    "fp16 bf16 amp mixedprecision useamp": "Pass precision='bf16' or 'fp16'",
    "dtype torchdtype": _DTYPE,
    "outputdir defaultrootdir savedir checkpointdir logdir": "Pass run_dir, where checkpoints and records go",
    "savesteps saveevery savestrategy": "Pass checkpoint_every",
    "savetotallimit savetopk keeplast": "Pass keep_checkpoints",
    "resumefromcheckpoint ckptpath loadpath": "Pass resume=True with the run's run_dir",
    "datacollator collate": "Pass collate_fn",
    "tokenizer processingclass": "Pass collate_fn, (samples) -> batch, which calls it, or tokenize before training",
    "groupbylength": "Leave it out: with a collate_fn each window is sorted by length",
    "modelinit": "Pass the model first: model=model_init()",
    "dataloadernumworkers workers": "Pass num_workers",
    "maxmemory memory memoryfraction gpumemory": "Pass memory_limit, as '8GiB' or 0.5",
    "validationsplit valsplit testsize": "Split the data, by torch.utils.data.random_split; pass validation_data",
    "strategy distributed ddp numnodes worldsize": "Start it by torchrun: its processes train together",
    "accelerator devices usecpu": "Pass device; ranks are started by torchrun",
    "gradientcheckpointing activationcheckpointing usegradientcheckpointing": _SAVING,
    "offload cpuoffload offloadactivations activationoffload activationoffloading saveoncpu": _OFFLOAD,
    "offloadoptimizer optimizeroffload offloadoptimizerdevice offloadparam": _OFFLOAD,
    "ntrials trials": "Pass num_trials to autoaccum.sweep, --trials on the command line",
    "deterministic": "Call torch.use_deterministic_algorithms(True) before; seed sets what is drawn",
    "loggingsteps logeverynsteps logsteps logevery": "Leave it out: every window is recorded, and told to callbacks",
    "verbose enableprogressbar disabletqdm": "Pass progress=True or False",
}
"""What is called otherwise elsewhere, without its punctuation, and what to do here."""

_IN_A_LOOP = {
    "effective_batch": "It is the batch that step(batch) is given: let the loader yield all samples of a step.",
    "lr_scheduler": "Step it yourself, by scheduler.step() after accumulator.step(batch).",
}
"""What a loop of the user's own does for arguments that an Accumulator does not have."""

_OF_A_CALLBACK = {
    "monitor": "Pass metric, 'loss' or the name of one of the run's metrics",
    "metricforbestmodel": "Pass metric, 'loss' or the name of one of the run's metrics",
    "greaterisbetter": "Pass mode='max' where higher is better, 'min' where lower is",
    "threshold earlystoppingthreshold": "Pass min_delta",
    "earlystoppingpatience": "Pass patience, in validations",
}
"""What a callback's arguments are called elsewhere."""

_MISSING = {
    "effective_batch": f"{_BATCH}.",
    "data": f"{_DATA}.",
    "mode": "Pass 'max' where higher is better, 'min' where lower is; by the lowest loss the best is kept without it.",
}
"""What to pass where an argument that has no default is left out."""


class _LeftOut:
    """What stands for an argument that was not passed."""

    def __repr__(self) -> str:
        return "(left out)"


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
        positional = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
        # Whose loss is in the model, or is none, takes a LightningModule as it takes any other.
        has_loss = "training_step" in signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                # Before Python itself says that effective_batch is missing, which would hide the better answer.
                if argument not in signature.parameters:
                    cure = _cure(argument, name, list(signature.parameters))
                    raise ArgumentTypeError(argument, kwargs[argument], f"an argument that {name} has", cure)
            # As elsewhere one writes fit(model, inputs, targets).
            if len(args) > len(positional):
                takes_data = "data" in positional
                named = [f"{each}=..." for each in signature.parameters if each not in ("self", *positional)]
                cure = f"Pass it by its name: {', '.join(named[:3])}{' and so on' if named[3:] else ''}."
                if takes_data:
                    cure = "Name it; inputs and targets are one argument, data=(inputs, targets)."
                own = [each for each in positional if each != "self"]
                given, place = kind_of(args[len(positional)]), len(own) + 1
                accepted = f"no more than {' and '.join(own)} without a name"
                raise ArgumentTypeError(f"argument {place} of {name}", given, accepted, cure)
            for argument, parameter in signature.parameters.items():
                is_there = argument in kwargs or argument in positional[: len(args)]
                if parameter.default is inspect.Parameter.empty and not is_there:
                    cure = _MISSING.get(argument, "")
                    raise ArgumentTypeError(argument, _LeftOut(), "a value, for it has no default", cure)
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
        cure = "Inputs and targets are one batch, a tuple, as a DataLoader yields them: {name}((inputs, targets))."
        if named:
            cure = "What a model takes by name is one batch, a dict: {name}({{'input_ids': ..., 'labels': ...}})."
        elif not given:
            cure = "It is called with all samples of a step; after backward(batch) it is optimizer.step() that steps."
        found = ", ".join([type(value).__name__ for value in given] + [f"{key}=..." for key in named]) or "nothing"
        accepted = "the batch, and nothing else"
        raise ArgumentTypeError(f"arguments of {name}", found, accepted, cure.format(name=name))

    return cast(F, without_own_frames(call))


def _cure(argument: str, name: str, parameters: list[str]) -> str:
    """Return what to pass to a function in the place of an argument that it does not have."""
    in_a_loop = _IN_A_LOOP if name == "Accumulator" else {}
    # To which the cure of what it finds itself leads.
    if name in ("check", "probe") and argument in ("loss_scope", "embed"):
        return f"Train with it: fit measures a loss over the whole window in its first one, and {name} has none."
    if name in _PASSES and argument in ("loss_scope", "embed"):
        return "Embed by predict(model, data, forward=embed), and call loss_fn on what it returns, a window at a time."
    if "metric" in parameters and (cure := _found(argument, _OF_A_CALLBACK)):
        return cure
    if cure := elsewhere(argument):
        if cure.startswith(_FITS) and "effective_batch" not in parameters:
            return "Leave it out: how many samples fit at once is found out."
        # An Accumulator has no effective batch, say: whoever passed it next would be told so.
        meant = re.match(r"Pass (\w+)[,.;=(]", cure)
        # Arithmetic, which finds out nothing.
        if name == "plan":
            return "Pass effective_batch, the samples of a step, and max_micro_batch, those that fit at once."
        # What fits is found out there as in training, and is bounded likewise.
        if name in _PASSES and meant is not None and meant[1] == "effective_batch":
            return "What fits at once is found out; max_micro_batch bounds it."
        if meant is None or meant[1] in parameters:
            return cure
        return in_a_loop.get(meant[1]) or f"autoaccum.fit has {meant[1]} for it, and {name} has nothing like it."
    return in_a_loop.get(argument) or meant_by(argument, parameters)


def meant_by(argument: str, parameters: Iterable[str]) -> str:
    """Return which parameter may have been meant by a name that none has; empty where none is like it."""
    # Two letters of three have to be right, or it is no help.
    spelt = {_plain(parameter): parameter for parameter in parameters}
    near = difflib.get_close_matches(_plain(argument), spelt, 1, cutoff=0.7)
    return f"Did you mean {spelt[near[0]]}?" if near else ""


def elsewhere(name: str) -> str:
    """Return what to pass here in the place of an argument of other trainers; empty where none has such a name."""
    return _found(name, ELSEWHERE)


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
