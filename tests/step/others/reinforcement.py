"""Learning from rollouts: PPO's update of one minibatch, in the manner of single-file implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical

from tests.step.others.harness import Loop


class Agent(nn.Module):
    """A policy and a value of each observation."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs = Categorical(logits=self.actor(x))
        return probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo_step(agent: Any, batch: Any, clip: float = 0.2, ent_coef: float = 0.01, vf_coef: float = 0.5) -> torch.Tensor:
    """Return the loss of a minibatch, its advantages normalised over it."""
    obs, actions, old_logprobs, advantages, returns, values = batch
    logprob, entropy, new_value = agent.get_action_and_value(obs, actions)
    ratio = (logprob - old_logprobs).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
    new_value = new_value.view(-1)
    clipped = values + (new_value - values).clamp(-clip, clip)
    v_loss = 0.5 * torch.max((new_value - returns) ** 2, (clipped - returns) ** 2).mean()
    return pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef


def ppo() -> Loop:
    torch.manual_seed(0)
    agent, n = Agent().double(), 72
    obs, actions = torch.randn(n, 4, dtype=torch.double), torch.randint(0, 3, (n,))
    with torch.no_grad():
        logprobs, _, values = agent.get_action_and_value(obs, actions)
        logprobs = logprobs + 0.1 * torch.randn(n, dtype=torch.double)
    advantages = 2 * torch.randn(n, dtype=torch.double) + 0.5
    data = (obs, actions, logprobs, advantages, advantages + values.view(-1), values.view(-1))
    return Loop(agent, data, window=24, micro_batch=4, training_step=ppo_step, through="Accumulator")
