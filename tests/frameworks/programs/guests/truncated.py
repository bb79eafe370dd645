"""Backpropagation through time, cut: a recurrent network, an update for each chunk of a text."""

import torch
from hand import hand
from small_models import compute_loss, draw_tokens
from torch import nn

LENGTH = 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.body = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 100)

    def forward(self, tokens, state=None):
        hidden, state = self.body(self.embedding(tokens), state)
        return self.head(hidden), state


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for text in range(6):
    tokens = draw_tokens(8, 6 * LENGTH + 1)
    state = None
    for begin in range(0, 6 * LENGTH, LENGTH):
        x, y = tokens[:, begin : begin + LENGTH], tokens[:, begin + 1 : begin + LENGTH + 1]
        state = tuple(one.detach() for one in state) if state else None
        with hand("forward"):
            logits, state = model(x, state)
        loss = compute_loss(logits, y)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("clip"):
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        with hand("optimizer"):
            optimizer.step()
        hand.step(loss=loss.item(), samples=8, tokens=8 * LENGTH)
    print(f"{text} {loss.item():.6f}")
hand.write()
