"""Cells of a notebook, run one after the other in one namespace; a cell is run twice."""

CELLS = [
    "import torch\nfrom hand import hand",
    "from small_models import LanguageModel, compute_loss, draw_tokens",
    "torch.manual_seed(1)\nmodel = LanguageModel()",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    """
for step in range(12):
    tokens = draw_tokens()
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
""",
    "print(f'loss {loss.item():.6f}')",
]

namespace = {"__name__": "__main__"}
for number in (0, 1, 2, 3, 4, 5, 4, 5):
    exec(compile(CELLS[number], f"<cell {number}>", "exec"), namespace)
namespace["hand"].write()
