"""A small DDP training: each rank learns from its own part of the data, and all of them have one model.

It is an ordinary PyTorch program, and runs under torchrun as it stands:

usage: flodl-tw run -n 4 --hosts 2 -- python examples/ddp.py
       torchrun --nproc-per-node 4 examples/ddp.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 5


def own_device() -> torch.device:
    """This rank's device.  Under flodl-tw a rank sees one GPU, under torchrun all of the host's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def samples() -> TensorDataset:
    """Points, and a function of them that is to be learnt; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(2048, 2, generator=generator) * 2 - 1
    return TensorDataset(points, torch.sin(3 * points[:, :1]) * points[:, 1:])


def train(device: torch.device) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(layers, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = samples()
    sampler = DistributedSampler(data, seed=2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for points, values in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(points.to(device)), values.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(points)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / (len(sampler) * dist.get_world_size()):.4f}", flush=True)


@record
def main() -> None:
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, {device.type}", flush=True)
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
