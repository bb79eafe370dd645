"""Small models that several programs train."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 100


class LanguageModel(nn.Module):
    """Predicts its input: tokens in, logits out."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """As some models have it: the root itself is never called."""
        return compute_loss(self.head(self.body(self.embedding(tokens))), tokens)


def compute_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def draw_tokens(batch: int = 8, length: int = 64) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))
