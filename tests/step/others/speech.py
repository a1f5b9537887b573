"""Speech recognition with CTC: spectrograms and transcripts of different lengths, the time first in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop


class DeepSpeech(nn.Module):
    """A convolution over time whose padding is masked, a recurrent layer, log-probabilities of letters."""

    def __init__(self, letters: int = 5, dim: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, dim, 3, padding=1)
        self.rnn = nn.GRU(dim, dim)
        self.fc = nn.Linear(dim, letters)

    def forward(self, spectra: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        x = F.hardtanh(self.conv(spectra), 0, 20)
        x = x * (torch.arange(x.size(2)) < sizes[:, None])[:, None]
        x, _ = self.rnn(x.permute(2, 0, 1))  # time first
        return F.log_softmax(self.fc(x), dim=-1)


def ctc_step(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean over the batch of each transcript's loss, over its length."""
    spectra, sizes, letters, target_sizes = batch
    targets = letters[torch.arange(letters.size(1)) < target_sizes[:, None]]  # one after another, as Baidu's CTC has it
    out = model(spectra, sizes)
    return F.ctc_loss(out, targets, sizes, target_sizes, blank=0, reduction="mean", zero_infinity=True)


def ctc() -> Loop:
    torch.manual_seed(0)
    n = 24
    sizes, target_sizes = torch.randint(5, 13, (n,)), torch.randint(1, 6, (n,))
    sizes[3] = 3  # too short for its transcript: an infinite loss, made zero
    target_sizes[3] = 5
    spectra = torch.randn(n, 4, 12, dtype=torch.double) * (torch.arange(12) < sizes[:, None])[:, None]
    data = (spectra, sizes, torch.randint(1, 5, (n, 5)), target_sizes)
    return Loop(DeepSpeech().double(), data, window=8, micro_batch=2, training_step=ctc_step)
