"""DDP: asynchronous checkpoints, an evaluation on rank 0 that others wait for, workers."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hand import hand
from small_models import LanguageModel, compute_loss
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(LanguageModel(128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(0, 100, (320, 64)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=1)
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    of_saves = dist.new_group(backend="gloo")
    saving = None
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        with hand("data"):
            iterator = iter(loader)
        while True:
            with hand("data"):
                batch = next(iterator, None)
            if batch is None:
                break
            with hand("forward"):
                logits = model(batch[0])
            loss = compute_loss(logits, batch[0])
            with hand("backward"):
                loss.backward()
            with hand("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            step += 1
            hand.step(loss=loss.item(), samples=8, tokens=batch[0].numel())
            if step % 16 == 0:
                if saving is not None:
                    saving.result()
                of_model, of_optimizer = get_state_dict(model, optimizer)
                state = {"model": of_model, "optimizer": of_optimizer}
                with hand("checkpoint"):
                    saving = dcp.async_save(
                        state, checkpoint_id=f"{place[0]}/{step}", process_group=of_saves
                    )
        model.eval()
        if rank == 0:
            with torch.no_grad():
                for (tokens,) in DataLoader(data, 32):
                    with hand("eval"):
                        model.module(tokens)
            print(f"epoch {epoch} {loss.item():.5f}", flush=True)
        model.train()
        dist.barrier()
    if saving is not None:
        saving.result()
    hand.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
