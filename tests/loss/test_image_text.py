"""Models of images and texts: through the adapter they have the gradient of their own loss of a big batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.loss.image_text import clip_model
from tests.models import relative_error
from tests.window_losses import F64, WINDOW, fitted, gradient_of

WORDS = 40

TEXT = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1,
    "max_position_embeddings": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "bos_token_id": 0,
    "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def two_encoders() -> Any:
    towers = transformers.CLIPVisionConfig(**VISION), transformers.BertConfig(**TEXT)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*towers, projection_dim=8)
    return transformers.VisionTextDualEncoderModel(config)


MODELS: dict[str, Callable[[], Any]] = {
    "CLIP": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    ),
    "SigLIP": lambda: transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION)),
    "ChineseCLIP": lambda: transformers.ChineseCLIPModel(
        transformers.ChineseCLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    ),
    "AltCLIP": lambda: transformers.AltCLIPModel(
        transformers.AltCLIPConfig(text_config=TEXT | {"project_dim": 16}, vision_config=VISION, projection_dim=8)
    ),
    "two encoders": two_encoders,
}


def images_and_texts(num_samples: int = WINDOW) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (num_samples, 7), generator=generator)
    lengths = torch.arange(num_samples) % 4 + 3
    mask = (torch.arange(7) < lengths[:, None]).long()
    ids = torch.where(mask.bool(), ids, 1)
    ids[torch.arange(num_samples), lengths - 1] = 2  # where CLIP pools
    pixels = torch.randn(num_samples, 3, 8, 8, generator=generator, dtype=F64)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(2)
    model = make().double()
    # As they are initialised, samples are nearly alike, and so are losses of whatever kind.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model.train()


class TestImagesAndTexts:
    @pytest.mark.parametrize("micro_batch", [1, 5, WINDOW])
    @pytest.mark.parametrize("name", MODELS)
    def test_the_gradient_is_that_of_the_models_own_loss(self, name: str, micro_batch: int) -> None:
        model, big, data = made(MODELS[name]), made(MODELS[name]), images_and_texts()
        loss = big(**data, return_loss=True).loss
        loss.backward()
        found, value = fitted(model, data, clip_model(model), micro_batch)
        assert relative_error(found, gradient_of(big.parameters())) < 1e-10
        assert value == pytest.approx(loss.item(), rel=1e-10)
        assert big.logit_scale.grad.abs() > 1e-6

    def test_what_a_processor_says_of_the_loss_is_no_matter(self) -> None:
        model, data = made(MODELS["CLIP"]), images_and_texts()
        arguments = clip_model(model)
        asked: list[Any] = []

        def called(**inputs: Any) -> Any:
            asked.append(inputs.get("return_loss"))
            return model(**inputs)

        batch = data | {"return_loss": False}
        for _ in range(2):
            images, texts = arguments["embed"](called, batch)
            assert images.shape == texts.shape == (WINDOW, 8)
        assert asked == [True, True]

    @pytest.mark.parametrize(("change", "micro_batch"), [("logits", 5), ("logits", 1), ("loss", [(1, 5, 6)])])
    def test_a_model_that_computes_otherwise_is_refused(self, change: str, micro_batch: Any) -> None:
        """By micro-batches of one sample too, as far as these tell."""

        class Other(transformers.CLIPModel):
            def forward(self, **inputs: Any) -> Any:
                found = super().forward(**inputs)
                if change == "logits":
                    found.logits_per_image = found.logits_per_image * 1.01
                else:
                    found.loss = found.loss * 1.01  # of one sample it is 0
                return found

        config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
        model = made(lambda: Other(config))
        with pytest.raises(ArgumentError, match=f"Its {change} are computed in another way"):
            fitted(model, images_and_texts(), clip_model(model), micro_batch, verify=False)

    def test_what_is_no_such_model_is_refused(self) -> None:
        with pytest.raises(ArgumentTypeError, match="model='Linear'.*CLIPModel"):
            clip_model(nn.Linear(2, 2))
        model = nn.Linear(2, 2)
        model.logit_scale = nn.Parameter(torch.tensor(1.0))
        arguments = clip_model(model)
        with pytest.raises(DataError, match="expected dicts"):
            arguments["embed"](model, torch.zeros(2, 2))
        with pytest.raises(ArgumentError, match="model='Linear'"):
            arguments["embed"](lambda **_: torch.zeros(2), {})
