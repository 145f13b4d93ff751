"""Compares patched and unpatched models: every causal language model of the installed transformers with a tiny config.

    python -m benchmarks.all_models [--types llama gemma2 ...] [--json FILE] [--markdown FILE]

Each model runs in float32. The training loss, its gradients, the evaluation logits and the tokens of a greedy `generate`
must agree with the unpatched model, or the model must be reported as left alone. Also counted are the bytes that aten operators
read and write in a training step, patched and not, beside products and views: what is left to fuse. Models run in worker
processes, so that a crash or a hang does not end the sweep.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import resource
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_topk": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # other names of the same sizes
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48, "d_model": 32, "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48, "d_ff": 48, "n_layers": 2, "n_heads": 4, "word_embed_proj_dim": 32, "embedding_size": 32,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "ffn_hidden_size": 48, "sliding_window": 16,
    "mamba_num_heads": 4, "mamba_n_heads": 8, "mamba_head_dim": 8, "mamba_d_head": 8, "mamba_expand": 2,
    "state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "lru_width": 32,
    "block_types": ["recurrent", "attention"],
}  # fmt: skip
EVEN_IF_NONE = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts"}
# For models in which the sizes above contradict each other. None keeps the config's own value.
OVERRIDES = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp"] + ["full_attention", "mlp"] * 2,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots3_note_text": {"mlp_layer_types": ["dense", "sparse"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_state": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"),
        {
            "unpadded_vocab_size": 96,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "nemotron_h": {"n_groups": 2, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 24},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "reformer": {"is_decoder": True},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Outcomes, and what is said of several models.
COUNTED = {
    "agrees": "agree", "left alone": "are left alone", "differs": "differ", "does not run unpatched": "do not run unpatched",
    "does not build": "do not build",
}  # fmt: skip


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def sizes_for(default) -> dict:
    """Arguments that make a config of this class small."""
    mine = OVERRIDES.get(default.model_type, {})
    sizes = {}
    if "per_layer_config" in default.to_dict():  # layers of several sizes
        sizes["per_layer_config"] = {}
        default = type(default)(**sizes)
    for name, value in {**TINY, **mine}.items():
        declared = getattr(type(default), name, None)
        fixed = isinstance(declared, property) and declared.fset is None
        present = hasattr(default, name) and (getattr(default, name) is not None or name in EVEN_IF_NONE)
        if value is not None and not fixed and (present or name in mine):
            sizes[name] = value
    if "num_key_value_heads" in sizes and default.num_key_value_heads == getattr(default, "num_attention_heads", None):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    declared = getattr(type(default), default.attribute_map.get("layer_types", "layer_types"), None)
    if kinds and "layer_types" not in mine and not isinstance(declared, property):
        sizes["layer_types"] = kinds
        sizes["num_hidden_layers"] = len(kinds)
    return sizes


def tiny_config(model_type: str):
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    text = getattr(default, "text_config", None)
    if text is not None:
        return type(default)(text_config={"model_type": text.model_type, **sizes_for(text)})
    return type(default)(**sizes_for(default))


def build(model_type: str):
    import torch
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    config = tiny_config(model_type)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **options).parameters())
    if count > 120e6:
        raise ValueError(f"{count} parameters with the tiny config")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options)
    for p in model.parameters():  # with weights of one and biases of zero, errors would not show
        if p.dim() <= 1:
            p.data += 0.1 * torch.randn_like(p)
    return model


def nodes(loss) -> set[str]:
    """The names of the autograd graph's nodes."""
    seen, waiting = {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen.values()}


# Operators that are not counted: products, which are no traffic to fuse, and attention's.
PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "_scaled_dot_product_attention_math",
}  # fmt: skip


@contextlib.contextmanager
def counting_bytes():
    """Yields bytes by the names of the aten operators that run."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    moved: collections.Counter = collections.Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            writes = not func.is_view and name not in ("empty", "empty_like", "empty_strided", "_unsafe_view", "detach")
            if func.namespace == "aten" and writes and name not in PRODUCTS:
                tensors = [
                    t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)
                ]
                # What is written in place is an argument and the result.
                moved[name] += sum(t.untyped_storage().nbytes() and t.numel() * t.element_size() for t in tensors)
            return out

    with Count():
        yield moved


def measure(model, ids) -> dict:
    import torch

    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.zero_grad()
    torch.manual_seed(1)
    with counting_bytes() as moved:
        loss = model(input_ids=ids, labels=ids).loss
        fused = "fused_linear_cross_entropy" in nodes(loss)
        loss.backward()
    out = {
        "fused": fused,
        "moved": moved,
        "loss": loss.detach(),
        **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    }
    model.eval()
    with torch.no_grad():
        out["logits"] = model(input_ids=ids).logits
        if model.can_generate():
            out["tokens"] = model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return out


def compare(model_type: str) -> dict:
    import torch

    from liger_ops.linear import project
    from liger_ops.transformers import apply_liger_kernel, unpatch

    # Patches small projections, too.
    project.LARGE = 0

    result = {"model_type": model_type, "outcome": "", "detail": "", "replaced": {}, "left_alone": {}}
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    try:
        model = build(model_type)
    except Exception as error:
        return result | {"outcome": "does not build", "detail": f"{type(error).__name__}: {error}"[:200]}
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    try:
        before, again = measure(model, ids), measure(model, ids)
        moved = before.pop("moved")
        before.pop("fused"), again.pop("fused"), again.pop("moved")
    except Exception as error:
        return result | {"outcome": "does not run unpatched", "detail": f"{type(error).__name__}: {error}"[:200]}
    noise = difference(before, again)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = apply_liger_kernel(model)
    for name, rows in (("replaced", report.replaced), ("left_alone", report.left_alone)):
        result[name] = dict(collections.Counter(f"{r.kind}: {r.replacement or r.reason}" for r in rows))
    if not report.replaced:
        return result | {"outcome": "left alone", "detail": "; ".join(result["left_alone"])}
    try:
        after = measure(model, ids)
    except Exception as error:
        return result | {"outcome": "differs", "detail": f"{type(error).__name__}: {error}"[:300]}
    left = after.pop("moved")
    result["bytes"] = {"before": moved.total(), "after": left.total(), "most": left.most_common(3)}
    if not after.pop("fused"):  # the model used the logits for more than the loss
        result["replaced"] = {k: n for k, n in result["replaced"].items() if not k.startswith("loss")}
        result["left_alone"]["loss: its forward needs the logits"] = 1
    worst, where = difference(before, after)
    unpatch(model)
    restored = measure(model, ids)
    restored.pop("fused"), restored.pop("moved")
    restored = difference(before, restored)[0]
    # Models with random numbers differ from run to run.
    agrees = worst <= max(1e-3, 2 * noise) and restored <= max(1e-6, 2 * noise)
    detail = "" if agrees else f"{where} by {worst:.2g}, from run to run {noise:.2g}, after unpatching {restored:.2g}"
    return result | {"outcome": "agrees" if agrees else "differs", "detail": detail, "worst": worst, "noise": noise}


def difference(a: dict, b: dict) -> tuple[float, str]:
    """The largest difference of any tensor, relative to the tensor's largest value, and its name."""
    if a.keys() != b.keys():
        return float("inf"), f"results {sorted(a.keys() ^ b.keys())[:3]}"
    worst = (0.0, "")
    top = max(
        [float(t.abs().max()) for n, t in a.items() if n not in ("loss", "logits", "tokens") and t.numel()] or [0.0]
    )
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape:
            return float("inf"), name
        if not x.numel():
            continue
        # A gradient that is only rounding noise is compared with the size of the other gradients.
        scale = max(float(x.abs().max()), 0.0 if name in ("loss", "logits", "tokens") else 1e-3 * top, 1e-9)
        gap = float((x.double() - y.double()).abs().nan_to_num(0.0 if x.isnan().any() else float("inf")).max()) / scale
        worst = max(worst, (gap, name))
    return worst


def work(types: list[str]) -> None:
    for model_type in types:
        print(json.dumps({"started": model_type}), flush=True)
        print(json.dumps(compare(model_type)), flush=True)


def compare_all(types: list[str], seconds: int) -> list[dict]:
    """In a worker process, and in another one after a crash."""
    results: list[dict] = []
    while waiting := types[len(results) :]:
        started, done = None, []
        command = [sys.executable, "-m", "benchmarks.all_models", "--work", *waiting]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            output, end = run.stdout, f"exit code {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired as late:
            output, end = (late.stdout or b"").decode(), f"no answer in {seconds} s"
        for line in output.splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                started = entry.get("started", started)
                if "outcome" in entry:
                    done.append(entry)
        if len(done) < len(waiting) and waiting[len(done)] == started:
            lost = {"outcome": "does not build", "detail": end, "replaced": {}, "left_alone": {}}
            done.append({"model_type": started, **lost})
        if not done:
            raise SystemExit(f"all_models: the worker did not start: {end}")
        results += done
    return results


def sweep(types: list[str], batch: int = 6, seconds: int = 600) -> list[dict]:
    results: list[dict] = []
    chunks = [types[i : i + batch] for i in range(0, len(types), batch)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(compare_all, chunks, [seconds] * len(chunks)):
            results += found
            print(f"[{len(results):3}/{len(types)}] {found[-1]['model_type']}", file=sys.stderr, flush=True)
    return results


def markdown(results: list[dict]) -> str:
    import torch
    import transformers

    counts = collections.Counter(r["outcome"] for r in results)
    replaced = [r["replaced"] for r in results if r["outcome"] == "agrees"]
    agreeing = [{op for row in rows for op in row.split(": ")[1].split(" and ")} for rows in replaced]
    ops = collections.Counter(op for used in agreeing for op in used)
    lines = [
        "# Patched models of transformers", "",
        f"{len(results)} causal language models of transformers {transformers.__version__}, torch {torch.__version__},",
        f"on {datetime.date.today()}: " + ", ".join(f"{counts[c]} {said}" for c, said in COUNTED.items() if counts[c]) + ".",
        "Operators used by the models that agree: " + ", ".join(f"{op} in {n}" for op, n in ops.most_common()) + ".",
        "Eager bytes: what PyTorch's own operators read and write in a training step (24 tokens, tiny sizes, float32), beside",
        "products and views, patched as a part of unpatched, with the three operators that move most of what is left. Attention's",
        "softmax and what the recurrences of hybrid models compute in plain PyTorch are among it.",
        "", "| model type | outcome | eager bytes | replaced | left alone, or the error |", "|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join(lines + [row(r) for r in results])


def row(result: dict) -> str:
    replaced, left = (", ".join(f"{k} × {v}" for k, v in result[name].items()) for name in ("replaced", "left_alone"))
    error = "" if result["outcome"] == "left alone" else textwrap.shorten(result["detail"], 100, placeholder=" ...")
    moved = result.get("bytes")
    most = ", ".join(name for name, _ in moved["most"]) if moved else ""
    share = f"{100 * moved['after'] / moved['before']:.0f} % ({most})" if moved and moved["before"] else ""
    cells = (result["model_type"], result["outcome"], share, replaced, ", ".join(filter(None, (left, error))))
    return f"| {' | '.join(cells)} |".replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all_models", description=__doc__)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    results = sweep(arguments.types or model_types())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")
    print(text)
    sys.exit(any(r["outcome"] == "differs" for r in results))


if __name__ == "__main__":
    main()
