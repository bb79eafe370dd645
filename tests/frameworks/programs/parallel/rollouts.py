"""PPO: rollouts without gradients, then several epochs of minibatches, in DDP."""

import torch
import torch.distributed as dist
from hand import hand
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

NUM_ENVIRONMENTS, NUM_MOVES = 64, 16


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.actor, self.critic = nn.Linear(512, 6), nn.Linear(512, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(observation)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def play(policy: nn.Module, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Observations, moves, their log probability, rewards, and what was expected."""
    rows = []
    for _ in range(NUM_MOVES):
        with torch.no_grad(), hand("eval"):
            logits, value = policy(observation)
        choice = Categorical(logits=logits)
        move = choice.sample()
        rows.append((observation, move, choice.log_prob(move), (move == 2).float(), value))
        observation = 0.9 * observation + 0.1 * torch.randn(NUM_ENVIRONMENTS, 64)
    return tuple(map(torch.cat, zip(*rows, strict=True)))


dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(Policy())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
torch.manual_seed(dist.get_rank())
for iteration in range(5):
    seen, moves, before, rewards, expected = play(model.module, torch.randn(NUM_ENVIRONMENTS, 64))
    advantage = rewards - expected
    for _ in range(2):
        for chosen in torch.randperm(len(seen)).split(256):
            with hand("forward"):
                logits, value = model(seen[chosen])
            choice = Categorical(logits=logits)
            ratio = (choice.log_prob(moves[chosen]) - before[chosen]).exp()
            gain = torch.min(ratio * advantage[chosen], ratio.clamp(0.8, 1.2) * advantage[chosen])
            loss = 0.5 * (value - rewards[chosen]).square().mean() - gain.mean()
            optimizer.zero_grad()
            with hand("backward"):
                loss.backward()
            with hand("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with hand("optimizer"):
                optimizer.step()
            hand.step(loss=loss.item(), samples=len(chosen))
    if dist.get_rank() == 0:
        print(f"iteration {iteration}: loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
hand.write()
