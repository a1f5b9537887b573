"""Laws 7 and 8 on training loops as others write them: exact and nothing said, or said with a measured error and its cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verification.others import contrastive, detection, experts, generative, language, reinforcement, speech
from tests.verification.others.harness import Outcome, check, run

COUNTS = ("items", "means", "counts", "averages")
"""Of a loss whose terms are means over different things: it may be exact, by counting each, or be said."""

EXPECTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    # loop: (what makes it, words of which what is said has to hold one); without words it has to be exact.
    "MoCo": (contrastive.moco, ("state", "momentum")),
    "SupCon": (contrastive.supcon, ("samples",)),
    "PPO": (reinforcement.ppo, ("samples",)),
    "MoE language model": (experts.moe, ("samples",)),
    "detection, padding seen": (detection.detection, ("padding", "padded")),
    "detection, padding masked": (detection.detection_masked, COUNTS),  # by a count kept above none
    "DETR": (detection.detr, COUNTS),
    "word LM": (language.word_lm, ()),
    "word LM, state carried": (language.word_lm_carried, ("state", "hidden")),
    "BERT": (language.bert, COUNTS),
    "nanoGPT": (language.nanogpt, ()),
    "nanoGPT, dropout": (language.nanogpt_dropout, ()),  # whose draws differ: only that nothing is said
    "WGAN-GP": (generative.wgan_gp, ()),
    "VQ-VAE": (generative.vqvae, ("state", "buffer")),
    "CTC": (speech.ctc, ()),
}


def cut(name: str, plan: str) -> Outcome:
    """Run a loop cut in one way: into equal micro-batches, unequal ones, as the search finds, or not at all."""
    loop = EXPECTED[name][0]()
    if plan == "auto":
        return run(loop, "auto", max_micro_batch=loop.micro_batch)
    if plan != "unequal":
        return run(loop, loop.micro_batch if plan == "equal" else loop.window)
    largest = loop.micro_batch + 1
    return run(loop, (*(largest for _ in range(loop.window // largest)), loop.window % largest))


@pytest.mark.parametrize("plan", ["equal", "unequal", "auto"])
@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_exact_or_said_with_its_error_and_cause(name: str, plan: str) -> None:
    outcome = cut(name, plan)
    assert all(len(sizes) > 1 for sizes in outcome.cuts), "nothing was cut"
    if plan == "unequal":
        assert all(len(set(sizes)) > 1 for sizes in outcome.cuts), "in equal parts"
    check(outcome, EXPECTED[name][1])


@pytest.mark.parametrize("name", EXPECTED)
def test_of_windows_that_are_not_cut_nothing_is_said(name: str) -> None:
    """By which also the harness is shown to compare like with like."""
    outcome = cut(name, "whole")
    assert {len(sizes) for sizes in outcome.cuts} == {1}
    assert len(outcome.cuts) == 3
    check(outcome)
