"""A loop of one's own on Accelerate: alone, under torchrun, by debug_launcher."""

import argparse

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import set_seed
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.utils.data import DataLoader, TensorDataset


def train(accumulate: int = 1) -> None:
    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hand.around(optimizer, "step", "optimizer")
    data = TensorDataset(draw_tokens(8 * 24 * accumulate * accelerator.num_processes))
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hand.around_fetches(model)
    losses = []
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            with hand("forward"):
                logits = model(tokens)
            loss = compute_loss(logits, tokens)
            with hand("backward"):
                accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                with hand("clip"):
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            mean, num_samples = sum(losses) / len(losses), 8 * len(losses)
            hand.step(loss=mean, samples=num_samples, tokens=num_samples * tokens.shape[1])
            if accelerator.process_index == 0:
                print(f"loss {mean:.5f}", flush=True)
            losses.clear()
    hand.write(accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--debug-launcher", action="store_true")
    options = parser.parse_args()
    if options.debug_launcher:
        debug_launcher(train, args=(options.accumulate,), num_processes=2)
    else:
        train(options.accumulate)
