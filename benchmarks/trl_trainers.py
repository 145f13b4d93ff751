"""TRL's trainers with and without liger_ops.integrations.trl: losses, time and peak memory of a few steps.

    python -m benchmarks.trl_trainers --out DIR [--size 1b] [--trainers SFT DPO GRPO] [--steps 20]

A Llama with random weights learns random words. Each training has its own process. Writes trl-trainers.jsonl and .md.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.arguments import add_out, positive
from benchmarks.machine import describe, slug
from benchmarks.pages import grid

TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")
WORDS = [f"w{i}" for i in range(60)]
PAIRS = {"SFT": ("text",), "DPO": ("prompt", "chosen", "rejected"), "KTO": ("prompt", "completion")}


class Size(NamedTuple):
    config: dict[str, Any]
    prompt: int  # words
    text: int
    batch: int
    rate: float


SIZES = {
    "tiny": Size(
        dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        prompt=6, text=12, batch=4, rate=1e-3,
    ),
    "1b": Size(
        dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        prompt=64, text=960, batch=8, rate=1e-5,
    ),
}  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def text(generator: torch.Generator, words: int) -> str:
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Ids, because a model with random weights writes few of the words."""
    return [float(sum(token % 3 == 0 for token in ids)) for ids in completion_ids]


def save_model(size: Size, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size.config)).save_pretrained(folder)


def trainer_of(kind: str, size: Size, steps: int, start: Path, folder: Path, on_cpu: bool) -> Any:
    """start: the folder of the model, from where DPO and GRPO load the reference model too."""
    import trl
    from datasets import Dataset
    from transformers import LlamaForCausalLM

    generator = torch.Generator().manual_seed(0)
    names = PAIRS.get(kind, ("prompt",))
    rows = [
        {name: text(generator, size.prompt if name == "prompt" else size.text) for name in names}
        | {"label": i % 2 == 0}
        for i in range(16 * size.batch)
    ]
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": size.batch,
        "learning_rate": size.rate, "logging_steps": 1, "report_to": [], "use_cpu": on_cpu, "bf16": not on_cpu,
        "save_strategy": "no", "seed": 0, "gradient_checkpointing": not on_cpu, "disable_tqdm": True,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        options |= {"num_generations": 4, "max_completion_length": min(8 * size.prompt, 64), "beta": 0.05}
        extra = {"reward_funcs": reward}
    if kind == "Distillation":
        options |= {"max_completion_length": min(8 * size.prompt, 64), "beta": 0.3}
        extra = {"teacher_model": LlamaForCausalLM.from_pretrained(start)}
        torch.nn.init.normal_(extra["teacher_model"].lm_head.weight)
    return getattr(trl, f"{kind}Trainer")(
        model=LlamaForCausalLM.from_pretrained(start), args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **extra,
    )  # fmt: skip


def step_times() -> Any:
    """A callback whose `seconds` are those of each step. Every step is logged, which waits for it."""
    from transformers import TrainerCallback

    class Times(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_log(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)

    return Times()


def train(kind: str, size: Size, steps: int, start: Path, folder: Path, on_cpu: bool = True) -> tuple[Any, dict]:
    """The trainer after its steps, and its losses, gradient norms, seconds and peak memory."""
    torch.manual_seed(0)
    trainer = trainer_of(kind, size, steps, start, folder, on_cpu)
    times = step_times()
    trainer.add_callback(times)
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    # On a CPU: of the whole process.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 if on_cpu else torch.cuda.max_memory_allocated()
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    curves = {name: [row[name] for row in logs] for name in ("loss", "grad_norm")}
    return trainer, {**curves, "seconds": times.seconds[: len(logs)], "peak_mib": peak / 2**20}


def table(records: list[dict[str, Any]]) -> str:
    plain = {r["trainer"]: r for r in records if not r["ours"] and "loss" in r}
    rows = []
    for r in records:
        name = [r["trainer"], "ours" if r["ours"] else "TRL"]
        if "error" in r:
            rows.append([*name, r["error"], *[""] * 5])
            continue
        found = [f"{r['seconds'][0]:.2f}", f"{statistics.median(r['seconds']):.3f}", f"{r['peak_mib']:,.0f}"]
        far = ["", ""]
        if r["ours"] and r["trainer"] in plain:
            norms = list(zip(r["grad_norm"], plain[r["trainer"]]["grad_norm"]))
            parts = [abs(a - b) / b if b else abs(a) for a, b in norms]
            far = [f"{parts[0]:.1e}", f"{max(parts):.1e}"]
        losses = f"{r['loss'][0]:.4f} … {r['loss'][-1]:.4f}"
        rows.append([*name, *found, losses, *far])
    header = ["trainer", "losses of", "first step, s", "median step, s", "peak MiB", "losses",
              "difference of the first gradient norm", "largest of all"]  # fmt: skip
    return grid(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_trainers", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=SIZES, help="default: 1b on CUDA, tiny on a CPU")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=["SFT", "DPO", "GRPO"])
    parser.add_argument("--steps", type=positive, default=20)
    add_out(parser)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    name = arguments.size or ("1b" if arguments.device == "cuda" else "tiny")
    size, on_cpu = SIZES[name], arguments.device == "cpu"
    if arguments.worker:
        kind, start, patched = arguments.worker
        if patched == "ours":
            from liger_ops.integrations import trl

            print(trl.patch())
        _, found = train(kind, size, arguments.steps, Path(start), Path(start).parent, on_cpu)
        print(json.dumps(found))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{slug(arguments.device)}-trl-trainers"
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        save_model(size, start)
        for kind in arguments.trainers:
            for patched in ("trl", "ours"):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.trl_trainers",
                    "--device",
                    arguments.device,
                    "--size",
                    name,
                ]
                command += ["--steps", str(arguments.steps), "--worker", kind, str(start), patched]
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith('{"loss"')]
                errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                found = json.loads(lines[-1]) if lines and not done.returncode else {"error": errors[-1][:200]}
                records.append({"kind": "trainer", "trainer": kind, "ours": patched == "ours", **found})
                print(kind, patched, {k: v for k, v in found.items() if not isinstance(v, list)}, flush=True)
    lines = [json.dumps(r) for r in (describe(arguments.device) | {"size": name}, *records)]
    stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    text = f"# TRL's trainers\n\nA Llama of size {name}, {arguments.steps} steps.\n\n{table(records)}\n"
    stem.with_suffix(".md").write_text(text)
    print(table(records))


if __name__ == "__main__":
    main()
