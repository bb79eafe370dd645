"""Deep Q-learning: moves, a buffer, a frozen target, an update at every fourth move."""

import random
from collections import deque

import torch
from hand import hand
from torch import nn


class Environment:
    """A point on a line that is to stay near 0."""

    def reset(self):
        self.state = torch.randn(16)
        return self.state

    def step(self, action: int):
        self.state = 0.95 * self.state + 0.1 * (action - 1) + 0.05 * torch.randn(16)
        return self.state, -float(self.state.abs().mean()), random.random() < 0.02


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
        )

    def forward(self, x):
        return self.layers(x)


random.seed(1)
torch.manual_seed(1)
environment = Environment()
policy, target = QNet(), QNet()
target.load_state_dict(policy.state_dict())
target.eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
memory = deque(maxlen=5_000)
state = environment.reset()
for move in range(64 + 4 * 40):
    if random.random() < 0.2:
        action = random.randrange(3)
    else:
        with torch.no_grad(), hand("eval"):
            values = policy(state)
        action = int(values.argmax())
    after, reward, done = environment.step(action)
    memory.append((state, action, reward, after))
    state = environment.reset() if done else after
    if move < 64 or move % 4:
        continue
    states, actions, rewards, afters = zip(*random.sample(memory, 64), strict=True)
    with hand("forward"):
        chosen = policy(torch.stack(states))
    chosen = chosen.gather(1, torch.tensor(actions)[:, None])[:, 0]
    with torch.no_grad():
        best = target(torch.stack(afters)).max(1).values
    loss = nn.functional.smooth_l1_loss(chosen, torch.tensor(rewards) + 0.99 * best)
    optimizer.zero_grad()
    with hand("backward"):
        loss.backward()
    with hand("clip"):
        nn.utils.clip_grad_value_(policy.parameters(), 100)
    with hand("optimizer"):
        optimizer.step()
    with torch.no_grad():
        for one, other in zip(target.parameters(), policy.parameters(), strict=True):
            one.lerp_(other, 0.01)
    hand.step(loss=loss.item(), samples=64)
print(f"{loss.item():.6f}")
hand.write()
