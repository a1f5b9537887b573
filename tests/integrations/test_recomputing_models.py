"""Models of many kinds, whose blocks compute their forward twice: the same bits, with dropout and all that they draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers

import autoaccum
from autoaccum.data import randomness
from autoaccum.events import MemorySaving, Notice, Recomputed
from tests.models import same

pytestmark = [
    pytest.mark.integrations,
    *map(
        pytest.mark.filterwarnings,
        ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    ),
]

WORDS, LENGTH = 48, 24
DEEP = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**DEEP, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
GPT = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2}
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 3, "attention_heads": 2, "ffn_dim": 32}.items()
}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 3}
TIERS = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
SOUND = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4}
SOUND |= {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 3, "mask_time_length": 2}


def text(samples: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (samples, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def marked_text() -> dict[str, torch.Tensor]:
    return {"input_ids": text()["input_ids"], "labels": torch.randint(0, 2, (4, LENGTH))}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 3}


def both() -> dict[str, Any]:
    return {"input_ids": text()["input_ids"], "pixel_values": pictures()["pixel_values"]}


def sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(4, 400), "labels": torch.arange(4) % 3}


def spectra() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(4, 8, 40), "labels": text()["labels"]}


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT, text),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**TEXT, "hidden_dropout": 0.1, "attention_dropout": 0.1}, text),
    "LlamaForCausalLM": ("LlamaConfig", {**TEXT, "num_key_value_heads": 1}, text),
    "MistralForCausalLM": ("MistralConfig", {**TEXT, "num_key_value_heads": 1, "sliding_window": 8}, text),
    "Qwen2ForCausalLM": ("Qwen2Config", {**TEXT, "num_key_value_heads": 1}, text),
    "Gemma2ForCausalLM": ("Gemma2Config", {**TEXT, "num_key_value_heads": 1, "head_dim": 8}, text),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16, "layerdrop": 0.3}, text),
    "BloomForCausalLM": (
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 2, "hidden_dropout": 0.1},
        text,
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
        text,
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**TEXT, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True,
         "shared_expert_intermediate_size": 16},
        text,
    ),
    "MambaForCausalLM": (
        "MambaConfig", {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4}, text
    ),
    "BertForMaskedLM": ("BertConfig", TEXT, text),
    "AlbertForMaskedLM": (
        "AlbertConfig", {**TEXT, "embedding_size": 8, "hidden_dropout_prob": 0.1, "inner_group_num": 2}, text
    ),
    "ElectraForPreTraining": ("ElectraConfig", {**TEXT, "embedding_size": 8}, marked_text),
    "DistilBertForMaskedLM": (
        "DistilBertConfig", {"vocab_size": WORDS, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32}, text
    ),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
        text,
    ),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, text),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 32, **SIDES, "encoder_layerdrop": 0.3},
        text,
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"vocab_size": WORDS, "d_model": 16, **SIDES, "num_mel_bins": 8, "max_source_positions": 20,
         "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        spectra,
    ),
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", {**DEEP, "vocab_size": WORDS, **SOUND}, sounds),
    "ViTForImageClassification": ("ViTConfig", {**DEEP, **IMAGE, "hidden_dropout_prob": 0.1}, pictures),
    "SwinForImageClassification": ("SwinConfig", {**TIERS, **IMAGE, "drop_path_rate": 0.3}, pictures),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3,
         "drop_path_rate": 0.3},
        pictures,
    ),
    "ResNetForImageClassification": (
        "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 3}, pictures
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": {**DEEP, "image_size": 16, "patch_size": 4},
         "projection_dim": 8},
        both,
    ),
}  # fmt: skip


class UNet(nn.Module):
    """Down and up again, each level given to the one as wide; spectral norms, and averages that follow."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 8), (8, 16), (16, 16)]
        self.down = nn.ModuleList(self._level(a, b) for a, b in widths)
        self.up = nn.ModuleList(self._level(2 * b, a) for a, b in reversed(widths))

    def _level(self, inputs: int, outputs: int) -> nn.Module:
        conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(inputs, outputs, 3, padding=1))
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU(), nn.Dropout2d(0.2))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, levels = pixel_values, []
        for level in self.down:
            x = level(x)
            levels.append(x)
            x = F.avg_pool2d(x, 2)
        for level, beside in zip(self.up, reversed(levels), strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return {"loss": F.mse_loss(x, pixel_values)}


def made(name: str, caches: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    randomness.seed_host(0)  # NumPy's too, of which some draw masks
    if name == "UNet":
        return UNet(), pictures()
    config, sizes, batch = KINDS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    # Keys and values lie in memory in another way where they are put into a cache, which changes the last bits.
    for layer in model.modules():
        if not caches and getattr(getattr(layer, "config", None), "use_cache", False):
            layer.config.use_cache = False
    return model, batch()


def train(name: str, precision: Any, memory_saving: Any, caches: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the losses, parameters, buffers and random state after three windows of two micro-batches, and the events."""
    model, batch = made(name, caches)
    model.train()

    def step(model: Any, batch: Any) -> Any:
        found = model(**batch, return_loss=True) if name == "CLIPModel" else model(**batch)
        return found["loss"]

    taken = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.05), training_step=step, micro_batch=2, precision=precision,
        memory_saving=memory_saving, verify=False,
    )  # fmt: skip
    losses = [torch.as_tensor(taken.step(batch)) for _ in range(3)]
    state = [*(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    return [*losses, *state], list(taken.events)


REFUSED: dict[str, str] = {}
"""What is not computed twice, by the model: a part of the reason that is told."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*KINDS, "UNet"])
def test_a_model_is_trained_to_the_same_bits(name: str, precision: str) -> None:
    plain, _ = train(name, precision, "off")
    found, events = train(name, precision, "checkpoint")
    assert same(found, plain)
    causes = [event.cause for event in events if isinstance(event, Notice) and "computed once more" in event.cause]
    assert causes == [] if name not in REFUSED else REFUSED[name] in causes[0]
    if name not in REFUSED:
        assert any(isinstance(event, MemorySaving) and event.blocks >= 1 for event in events)
        assert any(isinstance(event, Recomputed) and event.blocks > 0 for event in events)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_one_that_asks_for_a_cache_is_trained_without(name: str) -> None:
    without, _ = train(name, "fp32", "off")
    found, _ = train(name, "fp32", "checkpoint", caches=True)
    assert same(found, without)
    for a, b in zip(found, train(name, "fp32", "off", caches=True)[0], strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)


def test_there_are_twenty_one_of_them_and_more() -> None:
    assert len(KINDS) + 1 >= 21
