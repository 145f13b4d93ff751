"""Medusa: trains extra heads on a frozen language model. Head k predicts the token k + 2 positions ahead.

    python examples/medusa.py [--steps 30] [--heads 3]

Usually, training K heads needs memory for K times the logits. Here fused_linear_cross_entropy computes the losses
without storing the logits.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel


class MedusaHeads(nn.Module):
    """K residual blocks over the same hidden states, each with its own output projection."""

    def __init__(self, count: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        self.heads = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(count))

    def losses(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden: (B, S, n), ids: (B, S) -> (K,)."""
        losses = []
        for k, (block, head) in enumerate(zip(self.blocks, self.heads)):
            ahead = k + 2
            states = hidden + nn.functional.silu(block(hidden))
            losses.append(F.fused_linear_cross_entropy(states[:, :-ahead], head.weight, ids[:, ahead:]))
        return torch.stack(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device).eval().requires_grad_(False)
    apply_liger_kernel(model)
    medusa = MedusaHeads(arguments.heads, config.hidden_size, config.vocab_size).to(device)
    optimizer = torch.optim.AdamW(medusa.parameters(), lr=3e-3)
    # Sequences that count up from a random start, so that the next token can be predicted.
    starts = torch.randint(config.vocab_size, (arguments.steps, 8, 1), device=device)
    texts = (starts + torch.arange(48, device=device)) % config.vocab_size
    for step, ids in enumerate(texts, 1):
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
        losses = medusa.losses(hidden, ids)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}  losses " + "  ".join(f"{loss:.3f}" for loss in losses.tolist()), flush=True)


if __name__ == "__main__":
    main()
