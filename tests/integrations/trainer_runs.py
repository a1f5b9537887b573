"""Runs of trainers of transformers on small models from configs, stock and as windows, and what is compared of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainingArguments

WORDS = 48
_SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def texts(count: int = 70) -> list[dict[str, Any]]:
    """Return samples of words of many lengths, of which only the last ones count."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length, left_out = torch.randint(3, 12, (2,), generator=generator).tolist()
        words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
        ignored = min(left_out, length - 2)  # two words remain: the first one is never a target
        found.append({"input_ids": words, "labels": [-100] * ignored + words[ignored:]})
    return found


def sentences(count: int = 70) -> list[dict[str, Any]]:
    """Return samples of words with a class each."""
    return [{"input_ids": text["input_ids"], "labels": index % 3} for index, text in enumerate(texts(count))]


def pictures(count: int = 70) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 3} for i in range(count)]


def sounds(count: int = 70) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_values": torch.randn(80, generator=generator), "labels": i % 3} for i in range(count)]


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch, padded to its longest text."""
    batch = {}
    for name, first in samples[0].items():
        column = [sample[name] for sample in samples]
        if isinstance(first, list):
            longest = max(map(len, column))
            filler = -100 if name == "labels" else 0
            batch[name] = torch.tensor([one + [filler] * (longest - len(one)) for one in column])
            if name == "input_ids":
                batch["attention_mask"] = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in column])
        else:
            batch[name] = torch.stack(column) if isinstance(first, torch.Tensor) else torch.tensor(column)
    # As the models compute, which are in double precision here and there.
    kind = torch.get_default_dtype()
    return {name: value.to(kind) if value.is_floating_point() else value for name, value in batch.items()}


def gpt2(**options: Any) -> nn.Module:
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} | options
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=2))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, num_key_value_heads=2))


def mixtral() -> nn.Module:
    # Grouped products know no double precision.
    options = {"num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, **options))


def bert_of_sentences() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES, **_STILL, num_labels=3))


def bert_of_words() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES, **_STILL))


def distilbert() -> nn.Module:
    sizes = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    config = transformers.DistilBertConfig(**sizes, dropout=0, attention_dropout=0, num_labels=WORDS)
    return transformers.DistilBertForTokenClassification(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, **_STILL, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def wav2vec2() -> nn.Module:
    layers = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4}
    layers |= {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 3}
    still = {"hidden_dropout": 0, "attention_dropout": 0, "feat_proj_dropout": 0, "layerdrop": 0, "mask_time_prob": 0}
    sizes = {name: size for name, size in _SIZES.items() if name != "max_position_embeddings"}
    config = transformers.Wav2Vec2Config(**sizes, **layers, **still, activation_dropout=0, final_dropout=0)
    return transformers.Wav2Vec2ForSequenceClassification(config)


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0, init_lora_weights=False, fan_in_fan_out=True
    )
    return peft.get_peft_model(gpt2(), config)


Make = Callable[[], nn.Module]
MODELS: dict[Make, Callable[[], list[dict[str, Any]]]] = {
    **dict.fromkeys((gpt2, llama, qwen2, mixtral, bert_of_words, distilbert, t5, lora), texts),
    bert_of_sentences: sentences,
    vit: pictures,
    wav2vec2: sounds,
}
"""Models by the functions that make them, with their data."""


@dataclass
class Run(TrainerCallback):  # type: ignore[misc]
    """What a training showed."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    trainer: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("substep")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")

    @property
    def logged(self) -> list[dict[str, Any]]:
        """Return what was logged, without what depends on the clock."""
        clocks = ("runtime", "per_second", "flos", "preparation_time")
        return [
            {name: value for name, value in entry.items() if not name.endswith(clocks)}
            for entry in self.trainer.state.log_history
        ]


def arguments(path: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    """Return arguments of a short training on the CPU that writes nothing."""
    usual = {"max_steps": 3, "learning_rate": 0.05, "optim": "sgd", "save_strategy": "no", "report_to": []}
    usual |= {"disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "log_level": "error"}
    return kind(output_dir=str(path), **usual | options)


def train(
    kind: type,
    model: nn.Module,
    args: Any,
    data: Any,
    *,
    around: Callable[[int], Any] | None = None,
    resume: str | None = None,
    **options: Any,
) -> Run:
    """Train, and return what was seen of it.

    Args:
        kind: of the trainer.
        model: from a config.
        args: of the training.
        data: the samples.
        around: (number of a step, from 0) -> a context that the step is run in.
        resume: a checkpoint's folder.
        options: of the trainer.
    """
    run = Run()

    class Recorded(kind):  # type: ignore[misc]
        def training_step(self, model: nn.Module, *rest: Any) -> torch.Tensor:
            with contextlib.nullcontext() if around is None else around(len(run.losses)):
                loss = super().training_step(model, *rest)
            run.losses.append(loss.item())
            found = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
            run.gradients.append(torch.cat([gradient.flatten() for gradient in found]).clone())
            return loss

    if "data_collator" not in options:
        options["data_collator"] = collate
    callbacks = [run, *options.pop("callbacks", [])]
    run.trainer = Recorded(model, args=args, train_dataset=data, callbacks=callbacks, **options)
    run.trainer.train(resume_from_checkpoint=resume)
    return run


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with the same weights each time, in the default precision."""
    torch.manual_seed(1)
    return make()


def farthest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative distance between gradients of the same windows."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Compute in double precision throughout: models round norms and losses to 32 bits, each row by itself or not."""
    tensor, functional = torch.Tensor, torch.nn.functional
    kept = tensor.float, tensor.to, functional.softmax, torch.get_default_dtype()

    def to(self: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        if self.dtype is torch.float64:
            where = tuple(torch.float64 if one is torch.float32 else one for one in where)
            options = {name: torch.float64 if one is torch.float32 else one for name, one in options.items()}
        return kept[1](self, *where, **options)

    def softmax(self: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        if self.dtype is torch.float64:
            options.pop("dtype", None)
        return kept[2](self, *where, **options)

    tensor.float = lambda self, *rest: self if self.dtype is torch.float64 else kept[0](self, *rest)  # type: ignore
    tensor.to, functional.softmax = to, softmax  # type: ignore[assignment,method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        tensor.float, tensor.to, functional.softmax = kept[:3]  # type: ignore[method-assign]
        torch.set_default_dtype(kept[3])
