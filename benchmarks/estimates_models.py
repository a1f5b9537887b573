"""The models of ``estimates.py``: small ones of each kind, with batches of any size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, VOCABULARY = 64, 1000


class Subject(NamedTuple):
    """What is trained."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """(samples) -> a batch"""
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None


def images(size: int = 32, classes: int = 10) -> Callable[[int], Any]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(classes, (n,)))


def token_ids(n: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (n, length))


def texts(n: int) -> dict[str, torch.Tensor]:
    ids = token_ids(n)
    return {"input_ids": ids, "labels": ids}


def next_tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return token_ids(n), token_ids(n)


def of_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *[Residual(32) for _ in range(3)], nn.Conv2d(32, 64, 3, stride=2, padding=1),
        *[Residual(64) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def double(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
                nn.Conv2d(after, after, 3, padding=1), nn.SiLU(),
            )  # fmt: skip

        self.down = nn.ModuleList([double(3, 16), double(16, 32), double(32, 64)])
        self.up = nn.ModuleList([double(96, 32), double(48, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if not index else F.max_pool2d(x, 2))
            kept.append(x)
        for block, other in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), other], dim=1))
        return self.out(x)


class Encoder(nn.Module):
    """Of patches (ViT) or tokens (GPT), by PyTorch's own layers."""

    def __init__(self, *, of_images: bool) -> None:
        super().__init__()
        self.of_images = of_images
        self.embed: nn.Module = nn.Conv2d(3, 128, 4, stride=4) if of_images else nn.Embedding(VOCABULARY, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.head = nn.Linear(128, 10 if of_images else VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        mask = None
        if self.of_images:
            x = x.flatten(2).transpose(1, 2)
        else:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x.mean(1) if self.of_images else x)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.inner = nn.Transformer(128, 4, 3, 3, 256, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(x)
        return self.head(self.inner(embedded, embedded))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(256, 10)
        self.inner = kind(128, 256, num_layers=2, batch_first=True)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x))[0][:, -1])


class Mixer(nn.Module):
    """An MLP-Mixer: layers across patches, then across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 128, 4, stride=4), nn.Linear(128, 10)
        layer = lambda width: nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))  # noqa: E731
        self.across, self.within = (nn.ModuleList(layer(width) for _ in range(6)) for width in (64, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x)
            x = x + within(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(-1))


class Experts(nn.Module):
    """A mixture of experts; each token goes to the best one alone, or to all with a weight."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.is_sparse = is_sparse
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.router = nn.Linear(128, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        weights = self.router(x).softmax(-1)
        if not self.is_sparse:
            outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
            return self.head(x + (outputs * weights.unsqueeze(-2)).sum(-1))
        flat, best = x.flatten(0, 1), weights.flatten(0, 1).argmax(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (where,) = torch.where(best == index)
            out = out.index_add(0, where, expert(flat[where]))
        return self.head(x + out.view_as(x))


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 512), *[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)], nn.Linear(512, 10)
    )


OWN: dict[str, Subject] = {
    "deep net": Subject(deep, lambda n: (torch.randn(n, 256), torch.randint(10, (n,))), F.cross_entropy),
    "convolutions": Subject(conv_net, images(), F.cross_entropy),
    "ResNet": Subject(resnet, images(), F.cross_entropy),
    "U-Net": Subject(UNet, lambda n: (torch.randn(n, 3, 32, 32),) * 2, F.mse_loss),
    "GPT": Subject(lambda: Encoder(of_images=False), next_tokens, of_tokens),
    "ViT": Subject(lambda: Encoder(of_images=True), images(), F.cross_entropy),
    "MLP-Mixer": Subject(Mixer, images(), F.cross_entropy),
    "encoder and decoder": Subject(Translator, next_tokens, of_tokens),
    "LSTM": Subject(lambda: Recurrent(nn.LSTM), lambda n: (token_ids(n), torch.randint(10, (n,))), F.cross_entropy),
    "GRU": Subject(lambda: Recurrent(nn.GRU), lambda n: (token_ids(n), torch.randint(10, (n,))), F.cross_entropy),
    "all experts": Subject(lambda: Experts(is_sparse=False), next_tokens, of_tokens),
    "routed experts": Subject(lambda: Experts(is_sparse=True), next_tokens, of_tokens),
}


def hugging_face() -> dict[str, Subject]:
    """Models of transformers, made from small configurations; none where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    import transformers as hf

    text: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    layers: dict[str, Any] = {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256
    }  # fmt: skip
    picture: dict[str, Any] = {**layers, "image_size": 32, "patch_size": 4}
    ids_and_pixels = lambda n: {  # noqa: E731
        "input_ids": token_ids(n, 16), "pixel_values": torch.randn(n, 3, 32, 32), "return_loss": True
    }  # fmt: skip

    def pooled(model: Any, batch: Any) -> torch.Tensor:
        """The mean over tokens, as sentence encoders have it; pairs are to be alike."""
        first, second = (model(input_ids=batch[name]).last_hidden_state.mean(1) for name in ("first", "second"))
        return (1 - F.cosine_similarity(first, second)).mean()

    return {
        "GPT-2 (HF)": Subject(
            lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**text, n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH)),
            texts,
        ),
        "Llama (HF)": Subject(
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, **layers, num_key_value_heads=2)), texts
        ),
        "Qwen3 (HF)": Subject(
            lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**text, **layers, num_key_value_heads=2, head_dim=32)), texts
        ),
        "BERT (HF)": Subject(lambda: hf.BertForMaskedLM(hf.BertConfig(**text, **layers)), texts),
        "sentence encoder (HF)": Subject(
            lambda: hf.BertModel(hf.BertConfig(**text, **layers), add_pooling_layer=False),
            lambda n: {"first": token_ids(n), "second": token_ids(n)},
            training_step=pooled,
        ),
        "T5 (HF)": Subject(
            lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(
                    vocab_size=VOCABULARY,
                    d_model=128,
                    d_kv=32,
                    d_ff=256,
                    num_layers=3,
                    num_heads=4,
                    decoder_start_token_id=0,
                )
            ),
            texts,
        ),
        "ViT (HF)": Subject(
            lambda: hf.ViTForImageClassification(hf.ViTConfig(**picture)),
            lambda n: {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(2, (n,))},
        ),
        "CLIP (HF)": Subject(
            lambda: hf.CLIPModel(
                hf.CLIPConfig(
                    text_config={**layers, **text, "max_position_embeddings": 16},
                    vision_config=picture,
                    projection_dim=64,
                )
            ),
            ids_and_pixels,
        ),
        "Mixtral (HF)": Subject(
            lambda: hf.MixtralForCausalLM(
                hf.MixtralConfig(**text, **layers, num_key_value_heads=2, num_local_experts=4)
            ),
            texts,
        ),
    }


def subjects() -> dict[str, Subject]:
    """Return all that there are."""
    return OWN | hugging_face()
