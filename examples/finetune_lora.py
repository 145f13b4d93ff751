"""Fine-tuning a small Llama with LoRA adapters of peft, without and with the operators: time, losses and memory.

    python examples/finetune_lora.py [--steps 60] [--rank 16] [--hidden 128] [--layers 4]

Both runs start from the same random weights and see the same batches. On a GPU the base is bf16 and, as peft's default,
the adapters are fp32.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops.demo import progress
from liger_ops.transformers import apply_liger_kernel

CLASSES, LENGTH, BATCH = 256, 64, 8
# Steps whose time does not count: the first ones load kernels and fill caches.
WARMUP = 3


class Run(NamedTuple):
    milliseconds: float  # median of a step
    losses: list[float]
    peak: float  # GiB, or 0 without a GPU


def batches(steps: int, device: str) -> Tensor:
    """Sequences that count upwards from a random class, in steps of 1 to 3."""
    torch.manual_seed(1)
    start, stride = torch.randint(CLASSES, (steps, BATCH, 1)), torch.randint(1, 4, (steps, BATCH, 1))
    return ((start + stride * torch.arange(LENGTH)) % CLASSES).to(device)


def build(arguments: argparse.Namespace, device: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=CLASSES, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    adapters = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules="all-linear")
    return get_peft_model(model, adapters)


def train(model: nn.Module, data: Tensor, label: str) -> Run:
    has_gpu = data.is_cuda
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step, ids in enumerate(data, 1):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        progress(step, len(data), f"{label}, step {step}, loss {losses[-1]:.3f}")
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
    return Run(1e3 * statistics.median(seconds[WARMUP:] or seconds), losses, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, runs = batches(arguments.steps, device), {}
    for name in ("peft", "peft with liger_ops"):
        model = build(arguments, device)
        if name != "peft":
            print(apply_liger_kernel(model))
        runs[name] = train(model, data, name)
        del model
    for name, run in runs.items():
        memory = f", peak {run.peak:.2f} GiB" if run.peak else ""
        print(f"{name:20} {run.milliseconds:7.1f} ms/step, loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}{memory}")
    first, second = (run.losses for run in runs.values())
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(first, second)):.1e}")


if __name__ == "__main__":
    main()
