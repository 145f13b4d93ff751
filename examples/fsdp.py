"""Fine-tuning a language model over several GPUs with FSDP2, or over several CPU processes as a trial.

    torchrun --nproc-per-node 2 examples/fsdp.py [--model PATH] [--steps 10] [--plain]

Without --model a small Llama starts from random weights. Without GPUs the processes communicate through gloo.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from liger_ops.transformers import apply_liger_kernel

SMALL = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a name that from_pretrained takes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="without the operators, to compare")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(SMALL)
    model.train()
    if not arguments.plain:
        report = apply_liger_kernel(model)
        if rank == 0:
            print(report, flush=True)
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy} if device == "cuda" else {"mesh": mesh}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)
    vocabulary = model.config.vocab_size
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(vocabulary, (arguments.batch, 1), generator=generator)
        ids = ((starts + torch.arange(arguments.length)) % vocabulary).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:3}  loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    # Wait for all ranks. Then delete the model and the mesh: they keep the process group alive, whose thread must not
    # need the interpreter while it shuts down.
    dist.barrier()
    del model, layer, optimizer, loss, mean, mesh, options
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main()
