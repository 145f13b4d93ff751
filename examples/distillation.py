"""Distillation: a small Llama learns from a larger one: from its whole distribution, from its likeliest classes, or from
the text alone.

    python examples/distillation.py [--steps 150] [--beta 0.0] [--out distillation.png]

distillation_loss takes the hidden states and heads of both models, topk_distillation_loss the stored ids and
log-probabilities of the teacher's K likeliest classes. Neither stores logits.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops import functional as F
from liger_ops.demo import progress
from liger_ops.losses import distillation_loss, topk_distillation_loss
from liger_ops.transformers import apply_liger_kernel

CLASSES, LENGTH, BATCH, SUCCESSORS, TOP = 256, 32, 8, 4, 4


def text(sequences: int, seed: int, device: str) -> Tensor:
    """A Markov chain: each class has a few successors, the first of which is the likeliest. (sequences, LENGTH + 1)"""
    chain, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    following = torch.randint(CLASSES, (CLASSES, SUCCESSORS), generator=chain)
    state = torch.randint(CLASSES, (sequences,), generator=generator)
    states = [state]
    for _ in range(LENGTH):
        way = torch.multinomial(torch.tensor([8.0, 4.0, 2.0, 1.0]), sequences, True, generator=generator)
        states.append(state := following[states[-1], way])
    return torch.stack(states, 1).to(device)


def model_of(hidden: int, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=CLASSES, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device)
    apply_liger_kernel(model)
    return model


def states_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return model.model(input_ids=ids[:, :-1]).last_hidden_state


def optimize(model: LlamaForCausalLM, batches: list[Tensor], loss_of, label: str, test=lambda: 0.0) -> list[float]:
    """loss_of: (hidden states, ids) -> the loss. Returns the results of `test` after the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    found = []
    for step, ids in enumerate(batches, 1):
        loss = loss_of(states_of(model, ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(test())
        progress(step, len(batches), f"{label}, step {step}, loss {loss.item():.3f}")
    return found


def draw(curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, values in curves.items():
        axis.plot(values, label=name)
    axis.set(xlabel="step", ylabel="KL(teacher || student) on other text", yscale="log")
    axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--beta", type=float, default=0.0, help="0: KL(teacher || student), 1: the reverse")
    parser.add_argument("--out", type=Path, default=Path("distillation.png"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = model_of(128, device)
    optimize(
        teacher,
        list(text(4 * BATCH * arguments.steps, 1, device).split(4 * BATCH)),
        lambda hidden, ids: F.fused_linear_cross_entropy(hidden, teacher.lm_head.weight, ids[:, 1:]),
        "teacher",
    )
    teacher.requires_grad_(False)
    head = teacher.lm_head.weight
    batches, test = list(text(BATCH * arguments.steps, 2, device).split(BATCH)), text(64, 3, device)

    def from_whole(student: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
        return distillation_loss(
            hidden, student.lm_head.weight, states_of(teacher, ids), head, ids[:, 1:], beta=arguments.beta,
            soft_weight=0.8, hard_weight=0.2,
        )[0]  # fmt: skip

    def from_top(student: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
        # Stored in a data set, these would replace the teacher.
        log_probs, classes = torch.nn.functional.linear(states_of(teacher, ids), head).log_softmax(-1).topk(TOP)
        return topk_distillation_loss(
            hidden, student.lm_head.weight, classes, log_probs, ids[:, 1:], beta=arguments.beta, soft_weight=0.8,
            hard_weight=0.2,
        )[0]  # fmt: skip

    def from_text(student: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
        return F.fused_linear_cross_entropy(hidden, student.lm_head.weight, ids[:, 1:])

    curves = {}
    losses = {"whole teacher": from_whole, f"{TOP} likeliest classes": from_top, "text alone": from_text}
    for name, loss in losses.items():
        student = model_of(32, device)

        @torch.no_grad()
        def divergence(student: LlamaForCausalLM = student) -> float:
            pair = states_of(student, test), student.lm_head.weight, states_of(teacher, test), head
            return F.fused_linear_divergence(*pair, reduction="mean").divergence.item()

        curves[name] = optimize(student, batches, lambda *at: loss(student, *at), name, divergence)
    draw(curves, f"Distillation, beta {arguments.beta:g}", arguments.out)
    for name, values in curves.items():
        print(f"{name:20} KL from the teacher {values[0]:.3f} -> {values[-1]:.3f}")
    print(f"picture: {arguments.out.resolve()}")


if __name__ == "__main__":
    main()
