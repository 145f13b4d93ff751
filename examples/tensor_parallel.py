"""Training a small Llama with tensor, sequence and data parallelism (FSDP2), as torchtitan arranges them.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--tp 2] [--steps 10]

The other processes beyond --tp are data parallel. The loss depends on neither. Without GPUs the processes communicate
through gloo.
"""

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from liger_ops import functional as F
from liger_ops.distributed import LossHeadParallel
from liger_ops.nn import LinearLossHead, RMSNorm


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Each device has some of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = F.rope(q, k, cos, sin)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.w2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.swiglu(self.w1(x), self.w3(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(hidden, eps=1e-5), RMSNorm(hidden, eps=1e-5)
        self.attention, self.feed_forward = Attention(hidden, heads), FeedForward(hidden, intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, intermediate, heads) for _ in range(layers))
        self.norm = RMSNorm(hidden, eps=1e-5)
        self.output = LinearLossHead(hidden, vocabulary, bias=False)
        self.head_size = hidden // heads

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        frequencies = 1e4 ** (-torch.arange(0, self.head_size, 2, device=ids.device) / self.head_size)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), frequencies).repeat(1, 2)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.output(self.norm(x), target)


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Between the layers, hidden states are split along the sequence; inside them, heads and columns are."""
    split, gathered = (Shard(1),), (Replicate(),)
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        # Splits the vocabulary. The loss gathers the hidden states in chunks.
        "output": LossHeadParallel(input_layouts=Shard(1)),
    }
    for i in range(len(model.layers)):
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.attention": PrepareModuleInput(
                input_layouts=(*split, None, None), desired_input_layouts=(*gathered, None, None)
            ),
            f"layers.{i}.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            f"layers.{i}.ffn_norm": SequenceParallel(),
            f"layers.{i}.feed_forward": PrepareModuleInput(input_layouts=split, desired_input_layouts=gathered),
            f"layers.{i}.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="devices that share a layer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all devices")
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sizes = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = Llama(vocabulary := 512, hidden=64, intermediate=160, layers=2, heads=4).to(device)
    parallelize(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh["dp"], "mp_policy": policy} if device == "cuda" else {"mesh": mesh["dp"]}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    rank, length = mesh["dp"].get_local_rank(), arguments.length
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        starts = torch.randint(vocabulary, (arguments.batch, 1), generator=generator)
        ids = ((starts + torch.arange(length + 1)) % vocabulary).chunk(sizes[0])[rank].to(device)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            speed = arguments.batch * length / (time.perf_counter() - start)
            print(f"step {step:3}  loss {mean.item() / dist.get_world_size():.6f}  {speed:.0f} tokens/s", flush=True)
    # Wait for all ranks. Then delete what keeps the process group alive, whose thread must not need the interpreter
    # while it shuts down.
    dist.barrier()
    del model, layer, optimizer, loss, mean, mesh, options
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main()
