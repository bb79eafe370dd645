"""A student learns from a frozen teacher, whose time nobody names; lengths vary."""

import torch
from hand import hand
from small_models import LanguageModel
from torch.nn import functional as F

torch.manual_seed(0)
teacher, student = LanguageModel(128).eval().requires_grad_(False), LanguageModel(64)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)
for step in range(30):
    tokens = torch.randint(0, 100, (8, 32 + 8 * (step % 5)))
    with torch.no_grad():
        wanted = teacher(tokens)
    with hand("forward"):
        logits = student(tokens)
    soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean")
    loss = 0.5 * soft + 0.5 * F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    scheduler.step()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
