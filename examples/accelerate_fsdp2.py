"""Fine-tuning a language model with Hugging Face's Trainer, which shards it with FSDP2 through Accelerate.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py [--model PATH] [--steps 10] [--plain]

Without --model a small Llama starts from random weights. Without GPUs, Accelerate replicates the model instead
(DistributedDataParallel through gloo).
"""

import argparse
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import set_seed

from liger_ops.transformers import apply_liger_kernel

SMALL = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)


class Progress(TrainerCallback):
    def __init__(self, tokens: int) -> None:
        self.tokens, self.start = tokens, time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            now = time.perf_counter()
            speed = self.tokens * args.world_size / (now - self.start)
            print(f"step {state.global_step:3}  loss {float(logs['loss']):.6f}  {speed:.0f} tokens/s", flush=True)
            self.start = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a name that from_pretrained takes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="sequences per device and step")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="without the operators, to compare")
    arguments = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=arguments.steps, per_device_train_batch_size=arguments.batch, learning_rate=1e-3,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=not has_gpu, ddp_backend=None if has_gpu else "gloo",
            ddp_find_unused_parameters=False, bf16=has_gpu, fsdp=has_gpu,
            fsdp_config={"version": 2} if has_gpu else None,
        )  # fmt: skip
        set_seed(0)
        if arguments.model:
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(SMALL)
        if not arguments.plain:
            report = apply_liger_kernel(model)
            if options.process_index == 0:
                print(report, flush=True)

        vocabulary = model.config.vocab_size
        starts = torch.randint(vocabulary, (arguments.batch * arguments.steps * options.world_size, 1))
        ids = (starts + torch.arange(arguments.length)) % vocabulary
        trainer = Trainer(
            model, options, default_data_collator, [{"input_ids": row, "labels": row} for row in ids],
            callbacks=[Progress(arguments.batch * arguments.length)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if options.process_index == 0:
            print(trainer.accelerator.distributed_type, flush=True)
        trainer.train()
        dist.barrier()
    # The wrapped model goes before the process group: torch can hang if the model holds it last.
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
