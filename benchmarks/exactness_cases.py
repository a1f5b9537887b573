"""What benchmarks/exactness.py trains: a model, data and a loss for each case, small enough to run in milliseconds.

A case is a function without arguments that makes a fresh ``Work``, always the same one. It makes its tensors in
PyTorch's default dtype, so ``Case.make(dtype)`` gives the same work in float64 or float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made from configs; nothing is to be fetched

SAMPLES, EFFECTIVE_BATCH = 26, 12
FEATURES, CLASSES, TIME, VOCABULARY = 8, 5, 7, 20
IGNORED = -100
Batch = Any
"""A tuple or a dict of tensors with one row per sample."""


@dataclass(kw_only=True)
class Work:
    """What is trained on. The loss is the first of the three that is there."""

    model: nn.Module
    data: Batch
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """(outputs, targets) -> loss"""
    training_step: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    """(model, batch) -> loss; with neither the model returns its loss, as Hugging Face's do."""
    num_items: Callable[[Batch], Any] | None = None
    """Given to autoaccum; None where it is to find out by itself."""
    sum_and_count: tuple[Callable[[nn.Module, Batch], torch.Tensor], Callable[[Batch], torch.Tensor]] | None = None
    """The loss as a sum and the count to divide it by, for the recipe that asks for them."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups; empty: all parameters in one."""

    def loss(self, batch: Batch) -> torch.Tensor:
        if self.training_step is not None:
            return self.training_step(self.model, batch)
        if self.loss_fn is not None:
            inputs, targets = batch
            return self.loss_fn(self.model(inputs), targets)
        outputs = self.model(**batch)
        return outputs["loss"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    name: str
    work: Callable[[], Work]
    clip_norm: float | None = None
    precision: str = "fp32"
    bound: float | None = None
    """What float32 must keep, where rounding to 16 bits makes the usual bound meaningless."""
    peers: bool = True
    """False: only autoaccum is measured."""

    def make(self, dtype: torch.dtype) -> Work:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(0)
            return self.work()
        finally:
            torch.set_default_dtype(before)


CASES: list[Case] = []


def case(name: str, **options: Any) -> Callable[[Callable[[], Work]], Callable[[], Work]]:
    def add(work: Callable[[], Work]) -> Callable[[], Work]:
        CASES.append(Case(name=name, work=work, **options))
        return work

    return add


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def classes(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and a class per sample."""
    return torch.randn(samples, FEATURES), torch.randint(0, CLASSES, (samples,))


def some_ignored(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """A third has no target, unevenly: a window's micro-batches of 4 hold 1, 2 and 4 targets, or so."""
    inputs, targets = classes(samples)
    targets[[0, 1, 3, 5, 6, 13, 17, 18, 19]] = IGNORED
    return inputs, targets


def token_targets() -> torch.Tensor:
    """A class per token, sequences of very different lengths."""
    targets = torch.randint(0, CLASSES, (SAMPLES, TIME))
    for sample, length in enumerate([7, 1, 2, 7, 3, 6, 1, 1, 5, 2, 7, 4] * 3):
        if sample < SAMPLES:
            targets[sample, length:] = IGNORED
    return targets


def class_weights() -> torch.Tensor:
    return torch.linspace(0.1, 3.0, CLASSES)


def step_of(loss: Callable[..., torch.Tensor]) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """loss(outputs, targets, ...) of a batch (inputs, targets, ...), as a training step."""
    return lambda model, batch: loss(model(batch[0]), *batch[1:])


def targets_of(batch: Batch) -> torch.Tensor:
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def sum_over_targets(flatten: Callable[[torch.Tensor], torch.Tensor] = lambda outputs: outputs) -> Any:
    """Cross entropy as Accelerate's recipe for tokens wants it: the sum, and the number of labels that count."""
    return (
        step_of(lambda outputs, targets: cross_entropy(flatten(outputs), targets.flatten(), reduction="sum")),
        lambda batch: (targets_of(batch) != IGNORED).sum(),
    )


# Plain losses


@case("mean over samples")
def mean_over_samples() -> Work:
    return Work(model=mlp(), data=classes(), loss_fn=cross_entropy, sum_and_count=sum_over_targets())


@case("mean over samples, 29 of them: the last micro-batch has one")
def last_micro_batch_of_one() -> Work:
    return Work(model=mlp(), data=classes(29), loss_fn=cross_entropy, sum_and_count=sum_over_targets())


@case("sum over samples")
def sum_over_samples() -> Work:
    def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, reduction="sum")

    return Work(model=mlp(), data=classes(), loss_fn=summed)


@case("mean squared error, several outputs a sample")
def regression() -> Work:
    return Work(model=mlp(), data=(torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, CLASSES)), loss_fn=mse_loss)


# Means that are not over samples


@case("ignored targets")
def ignored_targets() -> Work:
    return Work(model=mlp(), data=some_ignored(), loss_fn=nn.CrossEntropyLoss(), sum_and_count=sum_over_targets())


@case("class weights")
def weighted_classes() -> Work:
    return Work(model=mlp(), data=classes(), loss_fn=nn.CrossEntropyLoss(weight=class_weights()))


@case("class weights and ignored targets")
def weighted_and_ignored() -> Work:
    return Work(model=mlp(), data=some_ignored(), loss_fn=nn.CrossEntropyLoss(weight=class_weights()))


@case("label smoothing")
def label_smoothing() -> Work:
    return Work(model=mlp(), data=classes(), loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1))


@case("label smoothing, class weights and ignored targets")
def smoothed_weighted_ignored() -> Work:
    loss = nn.CrossEntropyLoss(weight=class_weights(), label_smoothing=0.1)
    return Work(model=mlp(), data=some_ignored(), loss_fn=loss)


@case("binary cross entropy with pos_weight")
def pos_weight() -> Work:
    targets = (torch.rand(SAMPLES, CLASSES) < 0.3).to(torch.get_default_dtype())
    loss = nn.BCEWithLogitsLoss(pos_weight=class_weights())
    return Work(model=mlp(), data=(torch.randn(SAMPLES, FEATURES), targets), loss_fn=loss)


@case("a target per token, padding ignored")
def tokens() -> Work:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return Work(
        model=mlp(),
        data=(torch.randn(SAMPLES, TIME, FEATURES), token_targets()),
        training_step=step_of(loss),
        sum_and_count=sum_over_targets(lambda outputs: outputs.flatten(0, 1)),
    )


@case("a target per pixel, one class ignored")
def pixels() -> Work:
    targets = torch.randint(0, CLASSES, (SAMPLES, 6, 6))
    for sample in range(SAMPLES):  # from no ignored row to five
        targets[sample, : sample * 5 % 6] = 255
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, CLASSES, 1))
    return Work(
        model=model, data=(torch.randn(SAMPLES, 3, 6, 6), targets), loss_fn=nn.CrossEntropyLoss(ignore_index=255)
    )


@case("a micro-batch without a target")
def empty_micro_batch() -> Work:
    inputs, targets = some_ignored()
    targets[4:9] = IGNORED  # the second micro-batch of the unequal plan, and of the equal one
    return Work(model=mlp(), data=(inputs, targets), loss_fn=nn.CrossEntropyLoss(), sum_and_count=sum_over_targets())


@case("a window without a target")
def empty_window() -> Work:
    inputs, targets = some_ignored()
    targets[EFFECTIVE_BATCH : 2 * EFFECTIVE_BATCH] = IGNORED
    return Work(model=mlp(), data=(inputs, targets), loss_fn=nn.CrossEntropyLoss(), sum_and_count=sum_over_targets())


def masked_mean(outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As people write it by hand."""
    loss = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (loss * mask.flatten()).sum() / mask.sum()


def masked_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = token_targets()
    mask = (targets != IGNORED).to(torch.get_default_dtype())
    return torch.randn(SAMPLES, TIME, FEATURES), targets.clamp_min(0), mask


@case("masked mean written by hand")
def masked_by_hand() -> Work:
    return Work(model=mlp(), data=masked_tokens(), training_step=step_of(masked_mean))


@case("masked mean written by hand, num_items given")
def masked_and_counted() -> Work:
    return Work(
        model=mlp(), data=masked_tokens(), training_step=step_of(masked_mean), num_items=lambda batch: batch[2].sum()
    )


@case("a weight per sample, mean of the weighted losses")
def sample_weights() -> Work:
    def loss(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (cross_entropy(outputs, targets, reduction="none") * weights).mean()

    return Work(model=mlp(), data=(*classes(), torch.rand(SAMPLES)), training_step=step_of(loss))


@case("a weight per sample, divided by their sum, num_items given")
def normalised_sample_weights() -> Work:
    def loss(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum()

    data = (*classes(), torch.rand(SAMPLES) ** 3)
    return Work(model=mlp(), data=data, training_step=step_of(loss), num_items=lambda batch: batch[2].sum())


# Terms that do not grow with the batch


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.05 * sum(p.square().sum() for p in model.parameters())


@case("mean over samples and a weight penalty")
def penalised_mean() -> Work:
    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1]) + penalty(model)

    return Work(model=mlp(), data=classes(), training_step=step)


@case("sum over samples and a weight penalty")
def penalised_sum() -> Work:
    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="sum") + 10 * penalty(model)

    return Work(model=mlp(), data=classes(), training_step=step)


@case("ignored targets and a weight penalty")
def penalised_and_ignored() -> Work:
    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1]) + penalty(model)

    return Work(model=mlp(), data=some_ignored(), training_step=step)


# Hugging Face models, which return their loss


def language_data() -> dict[str, torch.Tensor]:
    """Sequences of different lengths; the labels are not shifted, for the models do that."""
    ids = torch.randint(0, VOCABULARY, (SAMPLES, TIME))
    return {"input_ids": ids, "labels": torch.where(token_targets() == IGNORED, IGNORED, ids)}


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def shifted_sum_and_count() -> Any:
    def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
        return shifted_loss(model(input_ids=batch["input_ids"])["logits"], batch["labels"], "sum")

    return summed, lambda batch: (batch["labels"][:, 1:] != IGNORED).sum()


class OwnLM(nn.Module):
    """A causal language model of one's own in the Hugging Face way; its loss is a mean over the shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(input_ids)
        return {"logits": logits} if labels is None else {"loss": shifted_loss(logits, labels), "logits": logits}


class OwnLMWithKwargs(OwnLM):
    """The same, and swallows what else it is called with, as many models do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        return super().forward(input_ids, labels)


@case("causal LM: OPTForCausalLM, which takes num_items_in_batch")
def opt() -> Work:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=TIME,
        dropout=0.0,
        use_cache=False,
    )
    model = OPTForCausalLM(config).to(torch.get_default_dtype())
    return Work(model=model, data=language_data(), sum_and_count=shifted_sum_and_count())


@case("causal LM: GPT2LMHeadModel, which takes it too")
def gpt2() -> Work:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TIME,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(torch.get_default_dtype())
    return Work(model=model, data=language_data(), sum_and_count=shifted_sum_and_count())


@case("causal LM of one's own: forward(input_ids, labels)")
def own_lm() -> Work:
    return Work(model=OwnLM(), data=language_data(), sum_and_count=shifted_sum_and_count())


@case("causal LM of one's own: forward(input_ids, labels, **kwargs)")
def own_lm_with_kwargs() -> Work:
    return Work(model=OwnLMWithKwargs(), data=language_data(), sum_and_count=shifted_sum_and_count())


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=TIME,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )


@case("masked LM: BertForMaskedLM")
def masked_lm() -> Work:
    from transformers import BertForMaskedLM

    ids = torch.randint(1, VOCABULARY, (SAMPLES, TIME))
    masked = torch.rand(SAMPLES, TIME) < torch.linspace(0.1, 0.6, TIME)[torch.randperm(SAMPLES) % TIME, None]
    masked[::EFFECTIVE_BATCH, 0] = True  # a target in every window
    data = {"input_ids": ids.masked_fill(masked, 0), "labels": ids.masked_fill(~masked, IGNORED)}

    def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"])["logits"]
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    count = sum_over_targets()[1]
    model = BertForMaskedLM(bert_config()).to(torch.get_default_dtype())
    return Work(model=model, data=data, sum_and_count=(summed, count))


@case("a label per sequence: BertForSequenceClassification")
def sequence_classification() -> Work:
    from transformers import BertForSequenceClassification

    data = {
        "input_ids": torch.randint(0, VOCABULARY, (SAMPLES, TIME)),
        "labels": torch.randint(0, CLASSES, (SAMPLES,)),
    }
    model = BertForSequenceClassification(bert_config()).to(torch.get_default_dtype())

    def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(input_ids=batch["input_ids"])["logits"], batch["labels"], reduction="sum")

    return Work(model=model, data=data, sum_and_count=(summed, sum_over_targets()[1]))


# Clipping, and parameters of every kind


@case("clip_norm, passed by the short window", clip_norm=1.0)
def clipped() -> Work:
    return mean_over_samples()


@case("clip_norm, passed by some windows, ignored targets", clip_norm=0.8)
def clipped_and_ignored() -> Work:
    return ignored_targets()


class Several(nn.Module):
    """A frozen layer, and one that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.net = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.frozen(inputs))


@case("frozen and unused parameters")
def frozen_and_unused() -> Work:
    return Work(model=Several(), data=some_ignored(), loss_fn=cross_entropy, sum_and_count=sum_over_targets())


@case("tied parameters")
def tied() -> Work:
    model = OwnLM()
    model.net[3].weight = model.net[0].weight
    return Work(model=model, data=language_data(), sum_and_count=shifted_sum_and_count())


@case("sparse gradients")
def sparse() -> Work:
    embedding = nn.EmbeddingBag(VOCABULARY, 16, mode="mean", sparse=True)
    targets = some_ignored()[1]
    model = nn.Sequential(embedding, nn.Tanh(), nn.Linear(16, CLASSES))
    return Work(
        model=model,
        data=(torch.randint(0, VOCABULARY, (SAMPLES, TIME)), targets),
        loss_fn=cross_entropy,
        sum_and_count=sum_over_targets(),
    )


class Complex(nn.Module):
    """A complex weight, a real loss."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(self.weight.dtype) @ self.weight).abs()


@case("complex parameters")
def complex_parameters() -> Work:
    return Work(model=Complex(), data=some_ignored(), loss_fn=cross_entropy, sum_and_count=sum_over_targets())


@case("parameter groups")
def groups() -> Work:
    model = mlp()
    chosen = [{"params": model[2].parameters(), "weight_decay": 0.1}, {"params": model[0].parameters()}]
    return Work(
        model=model, data=some_ignored(), loss_fn=cross_entropy, sum_and_count=sum_over_targets(), groups=chosen
    )


# Autocast: beside the big batch under the same autocast, in which both round to 16 bits


@case("bfloat16 autocast", precision="bf16", bound=1e-2, peers=False)
def bf16() -> Work:
    return ignored_targets()


@case("float16 autocast, scaled", precision="fp16", bound=2e-3, peers=False)
def fp16() -> Work:
    return ignored_targets()
