"""An actor-critic agent whose root is never called: it acts without gradients, then learns."""

import torch
from hand import hand
from torch import nn
from torch.distributions import Categorical

NUM_MOVES = 4


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        self.critic = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1))

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), hand("eval"):
            logits = self.actor(observation)
        return Categorical(logits=logits).sample()

    def evaluate(self, observation: torch.Tensor, action: torch.Tensor):
        with hand("forward"):
            logits = self.actor(observation)
        with hand("forward"):
            value = self.critic(observation)
        return Categorical(logits=logits).log_prob(action), value.squeeze(-1)


torch.manual_seed(1)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
for step in range(30):
    observations, actions, rewards = [], [], []
    observation = torch.randn(256, 64)
    for _ in range(NUM_MOVES):
        action = agent.act(observation)
        observations.append(observation)
        actions.append(action)
        rewards.append((action == 3).float())
        observation = 0.9 * observation + 0.1 * torch.randn(256, 64)
    log_prob, value = agent.evaluate(torch.cat(observations), torch.cat(actions))
    advantage = torch.cat(rewards) - value
    loss = -(log_prob * advantage.detach()).mean() + advantage.pow(2).mean()
    optimizer.zero_grad()
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    hand.step(loss=loss.item(), samples=256 * NUM_MOVES)
    if step % 10 == 9:
        print(f"step {step}: loss {loss.item():.6f}")
hand.write()
