"""Balances the experts of a mixture over the window, instead of over each micro-batch.

The balancing loss of a batch is E * sum_e F_e * P_e: F_e is the fraction of tokens that went to expert e, which has no
gradient, and P_e the mean probability that the router gave it (Fedus, Zoph and Shazeer, 2021, equations 4 to 6). Of a
micro-batch it is another loss than of the window, and asks each handful of tokens to be balanced by itself, which costs
quality (Qiu et al., "Demons in the Detail", 2501.11873). But given the window's F it is linear in the tokens: a mean of
E * sum_e F_e * p_e over them. So F is counted by forwards of the whole window before its first micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.errors import ArgumentError, ArgumentTypeError

_IGNORED = -100
"""The label of tokens that Hugging Face's losses leave out."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "num_selected_experts", "top_k")

Mask = Callable[[Any], torch.Tensor | None]
"""(micro-batch) -> what each token counts, 0 for padding; None where all count."""


def moe_balancing(
    model: nn.Module,
    *,
    routers: str | Sequence[str] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    top_k: int | None = None,
    coefficient: float | None = None,
    mask: Mask | None = None,
) -> dict[str, Callable[..., Any]]:
    """Return the arguments by which ``fit`` and ``Accumulator`` balance a mixture of experts over the window.

    ::

        autoaccum.fit(model, data, effective_batch=256, **autoaccum.moe_balancing(model))

    It takes Hugging Face's causal language models that return ``router_logits``, such as Mixtral, and any other model
    whose routers are modules. The window is run forward once more, without a gradient: about a third more work.

    Args:
        model: the one to train.
        routers: names of the modules whose outputs are router logits, (tokens, experts), or patterns of such names,
            "layers.*.gate"; those that a Hugging Face model returns when left out.
        training_step: (model, batch) -> loss, beside ``routers``: what the balancing is added to; the model returns it
            when left out. For a Hugging Face model it is the cross-entropy of the labels.
        top_k: experts that each token goes to; as the model's configuration has it when left out.
        coefficient: what the balancing loss is multiplied with; as the configuration has it when left out.
        mask: (micro-batch) -> what each token counts, as many as router logits have rows; its attention_mask when left
            out.

    Returns:
        ``{"training_step": ..., "before_window": ...}``.

    Raises:
        ArgumentError: an argument cannot be used, or the configuration does not say what is left out.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", model, "the module to train")
    if training_step is not None:
        _checks.function("training_step", training_step, ("model", "batch"), "loss")
    if training_step is not None and routers is None:
        cure = "Name the modules whose outputs are router logits."
        raise ArgumentError("training_step", training_step, "routers= beside it", cure)
    if mask is not None:
        _checks.function("mask", mask, ("micro_batch",), "a tensor with one number per token")
    top_k = _checks.positive_int("top_k", _configured(model, "top_k", top_k, _TOP_K))
    coefficient = _configured(model, "coefficient", coefficient, _COEFFICIENTS)
    coefficient = _checks.number_between("coefficient", coefficient, 0)
    balancing = _Balancing(top_k=top_k, coefficient=coefficient, mask=mask or _attention_mask)
    # Of Hugging Face's models the cross-entropy is known, and so are its tokens: both terms are divided by what the
    # window counts, and add up. Of a user's own step neither is: its loss and the balancing are means of their own.
    if routers is None:
        _check_router_logits(model)
        kind: Any = _OfHuggingFace(balancing)
    else:
        kind = _Hooked(balancing, _modules_named(model, routers), training_step)
    return {"training_step": kind.training_step, "before_window": kind.before_window}


class _Balancing:
    """The two halves of the balancing loss: what is counted before a window, and a micro-batch's part of it."""

    def __init__(self, *, top_k: int, coefficient: float, mask: Mask) -> None:
        self._top_k = top_k
        self._coefficient = coefficient
        self._mask = mask

    def counts(self, logits: Sequence[torch.Tensor], batch: Any) -> dict[str, torch.Tensor]:
        """Return, of a micro-batch, how many tokens went to each expert, (1, experts), and how many there are, (1,)."""
        # In float64, in which counts of any number of tokens are exact; none of it waits for the device.
        weights, experts = self._weights(logits, batch), logits[0].shape[-1]
        assigned = torch.zeros(experts, dtype=torch.float64, device=logits[0].device)
        rows = assigned.new_zeros(())
        for layer in logits:
            # Of the probabilities, as the model's own loss does: equal ones may be ordered otherwise than logits.
            selected = torch.topk(layer.softmax(dim=-1), self._top_k, dim=-1).indices
            counting = assigned.new_ones(len(layer)) if weights is None else weights.to(assigned)
            assigned = assigned.scatter_add(0, selected.flatten(), counting.repeat_interleave(self._top_k))
            rows = rows + counting.sum()
        return {"assigned": assigned[None], "rows": rows[None]}

    def loss(
        self, logits: Sequence[torch.Tensor], batch: Any, fractions: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the balancing loss of a micro-batch, given the window's fractions, (1, experts).

        Args:
            logits: (tokens, experts) of each layer.
            batch: the micro-batch.
            fractions: of the window's tokens, that went to each expert.
            rows: what the sum over tokens is divided by; None: the micro-batch's own.
        """
        weights, own = self._weights(logits, batch), torch.zeros((), device=logits[0].device)
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        probabilities = torch.zeros(logits[0].shape[-1], dtype=dtype, device=logits[0].device)
        # In the order of the model's own loss, so that what is rounded is rounded alike.
        for layer in logits:
            given = layer.softmax(dim=-1).to(dtype)
            if weights is not None:
                given = given * weights.to(given)[:, None]
            probabilities = probabilities + given.sum(dim=0)
            own = own + (len(layer) if weights is None else weights.to(given).sum())
        mean = probabilities / (own if rows is None else rows.to(dtype))
        found: torch.Tensor = self._coefficient * (torch.sum(fractions.to(mean) * mean[None]) * probabilities.numel())
        return found

    def _weights(self, logits: Sequence[torch.Tensor], batch: Any) -> torch.Tensor | None:
        """Return what each token counts, (tokens,).

        Raises:
            ArgumentError: there are not as many as rows of router logits.
        """
        weights = self._mask(batch)
        if weights is None:
            return None
        weights = weights.reshape(-1).to(logits[0].device)
        if any(len(layer) != len(weights) for layer in logits):
            found = f"{len(weights)} numbers for {len(logits[0])} rows of router logits"
            cure = "Let routers be modules that see each token once, and mask have a number for each of these."
            raise ArgumentError("mask", found, "one number per token", cure)
        return weights


class _OfHuggingFace:
    """A causal language model that returns its router logits."""

    def __init__(self, balancing: _Balancing) -> None:
        self._balancing = balancing

    def before_window(self, batch: Any, in_pieces: Callable[..., Any]) -> dict[str, Any]:
        """Count the window's tokens: those of each expert, all of them, and those with a label."""
        found = in_pieces(self._counts)
        rows = found["rows"].sum()
        # In float32, as the model's own loss has them; (1, experts), for what has no rows is told by its dim 0.
        assigned = found["assigned"].sum(dim=0, keepdim=True).to(torch.float32)
        return {
            "fractions": assigned / rows.to(torch.float32),
            "rows": rows,
            "labels": found["labels"].sum().clamp(min=1),
        }

    def _counts(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        # The head over the vocabulary is not asked for: of a small model it takes most of the time.
        few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(_bare(model).forward).parameters else {}
        outputs = _called(model, batch, **few)
        # Labels are shifted as the loss shifts them: the first of each text is predicted by nothing.
        labels = _labels_of(batch)
        counted = (labels[..., 1:] != _IGNORED).sum()[None]
        return {**self._balancing.counts(_router_logits_of(outputs), batch), "labels": counted}

    def training_step(self, model: Any, batch: Any, shared: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the cross-entropy and the balancing of a micro-batch, each as its part of the window's mean."""
        outputs = _called(model, batch)
        logits = outputs.logits
        # Both are divided by what the window counts, and so add up to the window's losses, whatever each has counts of.
        cross_entropy = _bare(model).loss_function(
            logits=logits,
            labels=_labels_of(batch),
            vocab_size=logits.shape[-1],
            num_items_in_batch=shared["labels"],
        )
        routed = _router_logits_of(outputs)
        balance = self._balancing.loss(routed, batch, shared["fractions"], shared["rows"])
        return {"cross_entropy": cross_entropy, "load_balance": balance.to(cross_entropy.device)}


class _Hooked:
    """Any model, whose routers are listened to."""

    def __init__(
        self, balancing: _Balancing, routers: Sequence[nn.Module], training_step: Callable[[Any, Any], Any] | None
    ) -> None:
        self._balancing = balancing
        self._routers = routers
        self._training_step = training_step

    def before_window(self, batch: Any, in_pieces: Callable[..., Any]) -> dict[str, Any]:
        """Count the window's tokens: those of each expert, and all of them."""
        found = in_pieces(self._counts)
        # (1, experts): as many experts as samples are no rows.
        return {"fractions": found["assigned"].sum(dim=0, keepdim=True) / found["rows"].sum()}

    def _counts(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        with _listening(self._routers) as logits:
            self._loss(model, batch)
        return self._balancing.counts(_heard(logits), batch)

    def training_step(self, model: Any, batch: Any, shared: Mapping[str, Any]) -> Any:
        """Return the loss of the user's step beside the balancing, each a mean over what it counts."""
        # Within the one forward that is trained on, so that the logits are those that have routed its tokens.
        with _listening(self._routers) as logits:
            loss = self._loss(model, batch)
        routed = _heard(logits)
        balance = self._balancing.loss(routed, batch, shared["fractions"], None)
        outputs: tuple[Any, ...] = ()
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, *outputs = loss  # type: ignore[assignment]
        several = dict(loss) if isinstance(loss, Mapping) else {"task": loss}
        losses = {**several, "load_balance": balance}
        return (losses, *outputs) if outputs else losses

    def _loss(self, model: Any, batch: Any) -> Any:
        # As ``fit`` calls a model that returns its loss by itself.
        if self._training_step is not None:
            return self._training_step(model, batch)
        outputs = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        return outputs["loss"] if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)


@contextmanager
def _listening(routers: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collect what routers return within it, in the order in which they are called."""
    heard: list[torch.Tensor] = []

    def hear(module: nn.Module, inputs: Any, output: Any) -> None:
        # Of those that return more, such as indices and weights, the logits come first.
        logits = output[0] if isinstance(output, tuple | list) else output
        heard.append(logits.reshape(-1, logits.shape[-1]))

    # Removed before the backward: where layers are checkpointed it runs them again.
    handles = [router.register_forward_hook(hear) for router in routers]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _heard(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    if not logits:
        cure = "Name modules that the forward calls, and that return logits of (tokens, experts)."
        raise ArgumentError("routers", "modules that were not called", "the routers of the model", cure)
    return logits


def _modules_named(model: nn.Module, routers: str | Sequence[str]) -> list[nn.Module]:
    """Return the modules of those names, each once, in the model's order.

    Raises:
        ArgumentError: there is none of a name.
    """
    # Patterns as of files, for layers differ in their numbers alone.
    patterns = [routers] if isinstance(routers, str) else list(routers)
    named = dict(_bare(model).named_modules())
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in named):
            names = ", ".join([name for name in named if name][:5])
            cure = f"Its modules are {names} and so on."
            raise ArgumentError("routers", pattern, "names of modules of the model, or patterns of them", cure)
    return [module for name, module in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _configured(model: nn.Module, argument: str, given: Any, names: Sequence[str]) -> Any:
    """Return what was passed; or what the model, or its configuration, has under one of these names.

    Raises:
        ArgumentError: neither is there.
    """
    if given is not None:
        return given
    # Models keep a copy of what their configuration says, which may have been changed since.
    bare = _bare(model)
    config = getattr(bare, "config", None)
    of_text = getattr(config, "get_text_config", lambda: None)()
    for holder in (bare, config, of_text):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return value
    raise ArgumentError(argument, None, "a number", f"The model's configuration has none: pass {argument}=.")


def _check_router_logits(model: nn.Module) -> None:
    bare = _bare(model)
    # By what it takes and has, not by its name: there are some thirty of them, and each release adds others.
    takes = inspect.signature(bare.forward).parameters
    if "output_router_logits" not in takes or not hasattr(bare, "loss_function"):
        accepted = "a Hugging Face model that returns router_logits"
        cure = "Name the modules whose outputs are router logits: routers='layers.*.gate'."
        raise ArgumentError("model", type(bare).__name__, accepted, cure)


def _bare(model: Any) -> Any:
    """Return the module that torch.compile wraps."""
    return getattr(model, "_orig_mod", model)


def _called(model: Any, batch: Any, **options: Any) -> Any:
    """Call a model on a batch without its labels, of which it would make a loss of its own."""
    # With labels it would compute a loss that balances the experts of this micro-batch.
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, output_router_logits=True, **options)


def _labels_of(batch: Any) -> torch.Tensor:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), torch.Tensor):
        raise ArgumentError("data", type(batch).__name__, "batches that are mappings with labels")
    labels: torch.Tensor = batch["labels"]
    return labels


def _router_logits_of(outputs: Any) -> list[torch.Tensor]:
    """Return (tokens, experts) of each layer that has experts."""
    logits = getattr(outputs, "router_logits", None) or ()
    found = [layer.reshape(-1, layer.shape[-1]) for layer in logits if isinstance(layer, torch.Tensor)]
    found = [layer for layer in found if layer.shape[-1] > 1]  # layers without experts have one
    if not found:
        cure = "Name the modules whose outputs are router logits: routers='layers.*.gate'."
        raise ArgumentError("model", "outputs without router_logits", "a model that returns them", cure)
    return found


def _attention_mask(batch: Any) -> torch.Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    # One of pairs of tokens is none of tokens.
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
