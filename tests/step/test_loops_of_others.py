"""Laws 7 and 8 on training loops as others write them: they are exact, and nothing is said of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.step.others import contrastive, detection, experts, generative, language, reinforcement, speech
from tests.step.others.harness import Loop, Outcome, check, run

pytestmark = pytest.mark.measured

LOOPS: dict[str, Callable[[], Loop]] = {
    "MoCo": contrastive.moco,
    "SupCon": contrastive.supcon,
    "PPO": reinforcement.ppo,
    "MoE language model": experts.moe,
    "detection, padding seen": detection.detection,
    "detection, padding masked": detection.detection_masked,  # by a count kept above none
    "DETR": detection.detr,
    "word LM": language.word_lm,
    "word LM, state carried": language.word_lm_carried,
    "BERT": language.bert,
    "nanoGPT": language.nanogpt,
    "nanoGPT, dropout": language.nanogpt_dropout,  # whose draws differ: only that nothing is said
    "WGAN-GP": generative.wgan_gp,
    "VQ-VAE": generative.vqvae,
    "CTC": speech.ctc,
}


def cut(name: str, plan: str) -> Outcome:
    """Run a loop cut in one way: into equal micro-batches, unequal ones, as the search finds, or not at all."""
    loop = LOOPS[name]()
    if plan == "auto":
        return run(loop, "auto", max_micro_batch=loop.micro_batch)
    if plan != "unequal":
        return run(loop, loop.micro_batch if plan == "equal" else loop.window)
    largest = loop.micro_batch + 1
    return run(loop, (*(largest for _ in range(loop.window // largest)), loop.window % largest))


@pytest.mark.parametrize("plan", ["equal", "unequal", "auto"])
@pytest.mark.parametrize("name", LOOPS)
def test_it_is_exact_and_nothing_is_said(name: str, plan: str) -> None:
    outcome = cut(name, plan)
    # A joined batch that would hold as much when it is split is run at once.
    assert plan == "auto" or all(len(sizes) > 1 for sizes in outcome.cuts), "nothing was cut"
    if plan == "unequal":
        assert all(len(set(sizes)) > 1 for sizes in outcome.cuts), "in equal parts"
    check(outcome)


@pytest.mark.parametrize("name", LOOPS)
def test_of_windows_that_are_not_cut_nothing_is_said(name: str) -> None:
    """By which also the harness is shown to compare like with like."""
    outcome = cut(name, "whole")
    assert {len(sizes) for sizes in outcome.cuts} == {1}
    assert len(outcome.cuts) == 3
    check(outcome)
