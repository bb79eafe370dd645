"""Sequence to sequence: the loop calls an encoder and a decoder; padded batches, many lengths."""

import random

import torch
from hand import hand
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, VOCABULARY = 0, 80


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 96, padding_idx=PAD)
        self.rnn = nn.GRU(96, 128, batch_first=True)

    def forward(self, source):
        return self.rnn(self.embedding(source))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 96, padding_idx=PAD)
        self.rnn = nn.GRU(96, 128, batch_first=True)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.out = nn.Linear(128, VOCABULARY)

    def forward(self, target, memory, hidden, mask):
        y, _ = self.rnn(self.embedding(target), hidden)
        seen, _ = self.attention(y, memory, memory, key_padding_mask=mask)
        return self.out(y + seen)


def collate(pairs):
    sources, targets = zip(*pairs, strict=True)
    return pad_sequence(sources, batch_first=True), pad_sequence(targets, batch_first=True)


random.seed(3)
torch.manual_seed(3)
pairs = []
for _ in range(480):
    length = random.randint(5, 40)
    sentence = torch.randint(1, VOCABULARY, (length,))
    pairs.append((sentence, sentence.flip(0)))
loader = DataLoader(pairs, 16, shuffle=True, collate_fn=collate)
encoder, decoder = Encoder(), Decoder()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
hand.around_fetches(encoder)
for epoch in range(1):
    encoder.train(), decoder.train()
    for source, target in loader:
        optimizer.zero_grad()
        with hand("forward"):
            memory, hidden = encoder(source)
        with hand("forward"):
            logits = decoder(target[:, :-1], memory, hidden, source == PAD)
        loss = criterion(logits.flatten(0, 1), target[:, 1:].flatten())
        with hand("backward"):
            loss.backward()
        with hand("clip"):
            nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1.0)
        with hand("optimizer"):
            optimizer.step()
        scheduler.step()
        tokens = source.numel() + target[:, :-1].numel()
        hand.step(loss=loss.item(), samples=len(source), tokens=tokens)
    print(f"epoch {epoch}: {loss.item():.5f}")
hand.write()
