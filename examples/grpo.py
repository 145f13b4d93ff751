"""GRPO: a small Llama learns to count from rewards alone. The prompt is a number, the answer should count up from it.

    python examples/grpo.py [--steps 60] [--loss-type dapo] [--out grpo.png]

Each prompt is answered by a group of samples; a sample's advantage is its reward relative to its group's. grpo_loss
computes log-probabilities, entropy and loss from hidden states, without logits.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops import functional as F
from liger_ops.demo import progress
from liger_ops.losses import grpo_loss
from liger_ops.transformers import apply_liger_kernel

NUMBERS, ANSWER, PROMPTS, GROUP, UPDATES = 16, 6, 16, 16, 2


@torch.no_grad()
def sampled(model: LlamaForCausalLM, prompts: Tensor) -> Tensor:
    """prompts: (B, 1) -> (B, 1 + ANSWER)."""
    ids = prompts
    for _ in range(ANSWER):
        last = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(last.float().softmax(-1), 1)], 1)
    return ids


def rewards_of(ids: Tensor) -> Tensor:
    """The share of tokens that are one above the token before."""
    return (ids[:, 1:] == (ids[:, :-1] + 1) % NUMBERS).float().mean(1)


def advantages_of(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, GROUP)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def train(steps: int, loss_type: str, device: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device)
    apply_liger_kernel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    curves: dict[str, list[float]] = {"reward": [], "entropy": [], "clip_ratio": []}
    for step in range(1, steps + 1):
        prompts = torch.randint(NUMBERS, (PROMPTS, 1), device=device).repeat_interleave(GROUP, 0)
        ids = sampled(model, prompts)
        rewards, target = rewards_of(ids), ids[:, 1:]
        mask = torch.ones_like(target)
        with torch.no_grad():
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
            old = F.fused_linear_log_probs(hidden, model.lm_head.weight, target).log_probs
        for _ in range(UPDATES):
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
            loss, metrics = grpo_loss(
                hidden, model.lm_head.weight, target, mask, advantages_of(rewards), old_log_probs=old,
                loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.28, max_completion_length=ANSWER,
            )  # fmt: skip
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for name, value in (metrics | {"reward": rewards.mean()}).items():
            curves[name].append(value.item())
        progress(step, steps, f"step {step}, reward {curves['reward'][-1]:.3f}, entropy {curves['entropy'][-1]:.2f}")
    return curves


def draw(curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    axes[0].plot(curves["reward"])
    axes[0].set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes[1].plot(curves["entropy"], label="entropy")
    axes[1].plot(curves["clip_ratio"], label="clipped share of tokens")
    axes[1].set(xlabel="step", ylim=(0, None))
    axes[1].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss-type", default="dapo")
    parser.add_argument("--out", type=Path, default=Path("grpo.png"))
    arguments = parser.parse_args()
    curves = train(arguments.steps, arguments.loss_type, "cuda" if torch.cuda.is_available() else "cpu")
    draw(curves, f"GRPO ({arguments.loss_type}): counting up", arguments.out)
    tail = curves["reward"][-5:]
    print(f"reward {curves['reward'][0]:.3f} -> {sum(tail) / len(tail):.3f}; picture: {arguments.out.resolve()}")


if __name__ == "__main__":
    main()
