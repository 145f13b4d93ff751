"""Deliberate defects, each a mistake that a person makes, and the tests that should notice it. See run.py."""

from typing import NamedTuple


class Defect(NamedTuple):
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # arguments of pytest, with files relative to tests/; files that a checkout lacks are dropped
    generates: bool = False  # whether C++ is generated from what changes
    thorough: bool = False  # whether only thorough tests notice it

    @property
    def compiled(self) -> bool:
        return self.generates or self.file.startswith("csrc/")


OPERATORS = [
    Defect(
        "rms-norm-drops-epsilon", "csrc/core/cpu/rms.h",
        "std::sqrt(squares / n + eps)", "std::sqrt(squares / n)",
        "ops/norms/test_rms_norm.py ops/test_every_operator.py",
    ),
    Defect(
        "rms-norm-gradient-misses-a-scale", "csrc/ops/norms/rms_norm_cpu.cpp",
        "C(dot * scale * scale / n)", "C(dot * scale / n)",
        "ops/norms/test_rms_norm.py ops/test_every_operator.py",
    ),
    Defect(
        "rms-norm-forgets-the-sums-gradient", "csrc/ops/norms/rms_norm_cpu.cpp",
        "(g[i] * w[i] - v[i] * mean) * scale + r[i];", "(g[i] * w[i] - v[i] * mean) * scale;",
        "ops/norms/test_fused_add_rms_norm.py ops/test_every_operator.py",
    ),
    Defect(
        "rms-norm-saves-half-statistics", "csrc/ops/norms/rms_norm.cpp",
        "core::empty_per_row(out.y, core::compute_type(x))", "core::empty_per_row(out.y, x.scalar_type())",
        "ops/norms/test_rms_norm.py ops/test_every_operator.py ops/test_compile.py ops/test_registration.py",
    ),
    Defect(
        "rms-norm-accepts-any-weight", "csrc/ops/norms/rms_norm.cpp",
        'if (weight.defined()) core::check_column_parameter(op, "weight", weight, x);', "",
        "ops/norms/test_norms.py ops/test_every_operator.py",
    ),
    Defect(
        "rms-norm-overwrites-a-gradient-in-use", "csrc/ops/norms/rms_norm.cpp",
        "node.needs(0) && node.may_overwrite(dy, x);",
        "node.needs(0) && dy.is_contiguous() && x.is_contiguous();",
        "ops/test_reuse.py ops/norms/test_rms_norm.py",
    ),
    Defect(
        "operators-lose-their-options-in-compiled-autograd", "csrc/core/operator.h",
        "return std::tie(options);", "return std::tuple<>();",
        "ops/test_compiled_autograd.py ops/norms/test_rms_norm.py",
    ),
    Defect(
        "gated-norm-applies-the-gate-twice", "csrc/ops/norms/rms_norm_gated_cpu.cpp",
        "if (!a.gate_first) multiply(out, out, activation", "multiply(out, out, activation",
        "ops/norms/test_rms_norm_gated.py ops/test_every_operator.py",
    ),
    Defect(
        "gated-norm-rounds-a-product-before-a-wide-weight", "csrc/ops/norms/rms_norm_gated.h",
        "weight.defined() && weight.scalar_type() == x.scalar_type();", "weight.defined();",
        "ops/norms/test_rms_norm_gated.py",
    ),
    Defect(
        "gated-norm-gradient-of-the-gate-misses-the-norm", "csrc/ops/norms/rms_norm_gated_cpu.cpp",
        "out[i] = g[i] * norm[i] * by[i];", "out[i] = g[i] * v[i] * by[i];",
        "ops/norms/test_rms_norm_gated.py",
    ),
    Defect(
        "fused-add-rms-norm-saves-a-leaf-as-an-output", "csrc/ops/norms/fused_add_rms_norm.cpp",
        "if (s_has_gradient) connect(s);", "connect(s);",
        "ops/norms/test_fused_add_rms_norm.py ops/test_every_operator.py",
    ),
    Defect(
        "layer-norm-mean-is-not-corrected", "csrc/ops/norms/layer_norm_cpu.cpp",
        "const C mean = C(near + drift / n);", "const C mean = near;",
        "ops/norms/test_layer_norm.py",
    ),
    Defect(
        "gated-product-forgets-up", "csrc/ops/gated/gated_cpu.h",
        "p[i] = act.value * other;", "p[i] = act.value;",
        "ops/gated/test_gated.py ops/test_every_operator.py",
    ),
    Defect(
        "geglu-slope-has-the-wrong-sign", "csrc/ops/gated/geglu.cpp",
        "normal.cdf + x * normal.pdf", "normal.cdf - x * normal.pdf",
        "ops/gated/test_gated.py ops/test_every_operator.py",
    ),
    Defect(
        "swiglu-gradient-stops-at-the-limit", "csrc/ops/gated/swiglu.cpp",
        "return {act.value, x > C(limit) ? C(0) : act.slope};", "return {act.value, x >= C(limit) ? C(0) : act.slope};",
        "ops/gated/test_swiglu.py",
    ),
    Defect(
        "gated-overwrites-up-in-use", "csrc/ops/gated/gated.h",
        "node.may_overwrite(gate, up) && node.may_overwrite(up, gate)",
        "node.may_overwrite(gate, up) && up.strides() == gate.strides()",
        "ops/gated/test_gated.py ops/test_reuse.py",
    ),
    Defect(
        "gated-packed-accepts-odd-widths", "csrc/ops/gated/gated.h",
        "gate_up.sym_size(-1) % 2 == 0", "gate_up.sym_size(-1) > 0",
        "ops/gated/test_gated.py ops/test_every_operator.py",
    ),
    Defect(
        "gated-reads-a-freed-weight", "csrc/ops/gated/gated.h",
        'if (!core::has_memory(weight)) core::refuse_memory(std::string(kOp) + " backward", "weight", weight);', "",
        "ops/test_memory.py ops/gated/test_gated.py ops/test_threads_and_memory.py",
    ),
    Defect(
        "elements-last-span-is-too-long", "csrc/core/rows/elements.h",
        "f(row, first, std::min(kSpan, walk.n - first));", "f(row, first, kSpan);",
        "ops/activations/test_relu_squared.py ops/gated/test_gated.py",
    ),
    Defect(
        "relu-squared-hides-nan", "csrc/ops/activations/relu_squared.cpp",
        "return v <= 0 ? decltype(v)(0) : v * v;", "return v > 0 ? v * v : decltype(v)(0);",
        "ops/activations/test_relu_squared.py",
    ),
    Defect(
        "rope-of-halves-overwrites-its-gradient", "csrc/ops/rope/rope.cpp",
        "if (!halves_out && needs_q", "if (needs_q",
        "ops/rope/test_rope.py",
    ),
    Defect(
        "router-rounds-no-score", "csrc/ops/moe/moe_router.cpp",
        "for (C& s : scores) s = std::sqrt(s);\n    core::round_all(storage, scores.data(), n);",
        "for (C& s : scores) s = std::sqrt(s);",
        "ops/moe/test_moe_router.py",
    ),
    Defect(
        "router-counts-a-repeated-expert-once", "csrc/ops/moe/moe_router.cpp",
        "d[chosen[k]] += C(w.scale)", "d[chosen[k]] = C(w.scale)",
        "ops/moe/test_moe_router.py",
    ),
    Defect(
        "rope-copies-one-column-too-few", "csrc/ops/rope/rope_cpu.cpp",
        "(a.width - end) * bytes", "(a.width - end - 1) * bytes",
        "ops/rope/test_rope.py",
    ),
    Defect(
        "rope-gradient-ignores-a-strided-k", "csrc/ops/rope/rope.cpp",
        "dq.sym_strides().equals(q_strides) && dk.sym_strides().equals(k_strides)) {",
        "dq.sym_strides().equals(q_strides)) {",
        "ops/rope/test_rope.py ops/test_reuse.py",
    ),
    Defect(
        "rope-loses-sections-in-compiled-autograd", "csrc/ops/rope/rope.cpp",
        "columns.halves_out, sections, q_strides", "columns.halves_out, q_strides",
        "ops/test_compiled_autograd.py ops/rope/test_rope.py",
    ),
    Defect(
        "embedding-forgets-a-negative-padding-index", "csrc/ops/embedding/embedding.cpp",
        "return *padding_idx < 0 ? (classes + *padding_idx).guard_int(__FILE__, __LINE__) : *padding_idx;",
        "return *padding_idx;",
        "ops/embedding/test_embedding.py",
    ),
    Defect(
        "embedding-accepts-one-class-too-many", "csrc/ops/embedding/embedding.cpp",
        "*padding_idx < classes && *padding_idx >= -classes", "*padding_idx <= classes && *padding_idx >= -classes",
        "ops/embedding/test_embedding.py ops/test_every_operator.py",
    ),
    Defect(
        "cross-entropy-leaves-ignored-rows", "csrc/ops/losses/cross_entropy_cpu.cpp",
        "return write_zeros(out, n);", "return;",
        "ops/losses/test_logits_losses.py ops/test_every_operator.py",
    ),
    Defect(
        "cross-entropy-divides-z-loss-by-weight", "csrc/ops/losses/cross_entropy_cpu.cpp",
        "total(1) / by_count", "total(1) / by_weight",
        "ops/losses/test_logits_losses.py",
    ),
    Defect(
        "cross-entropy-true-class-misses-the-softcap", "csrc/ops/losses/cross_entropy_cpu.cpp",
        "if (a.cap) at_y *= softcapped(own, *a.cap).slope;", "",
        "ops/losses/test_logits_losses.py",
    ),
    Defect(
        "linear-loss-reads-the-first-chunk", "csrc/ops/losses/linear/fused_linear_cross_entropy_loop.h",
        "all.narrow(1, first, count)", "all.narrow(1, 0, count)",
        "ops/losses/test_linear_losses.py -k some_of_the_gradients",
    ),
    Defect(
        "linear-loss-keeps-the-last-chunk", "csrc/ops/losses/linear/head.h",
        "dlogits.t(), left, row > 0, scale", "dlogits.t(), left, 0, scale",
        "ops/losses/test_linear_losses.py",
    ),
    Defect(
        "linear-loss-scales-logits-once", "csrc/ops/losses/linear/head.h",
        "weight.narrow(0, c, classes), c > 0, scale, sustained", "weight.narrow(0, c, classes), c > 0, 1, sustained",
        "ops/losses/test_linear_losses.py",
    ),
    Defect(
        "low-rank-addend-misses-the-scale", "csrc/gemm/adapters/low_rank.h",
        "detail::multiply_aten(sum, own, b.narrow(1, first, count), 0, scale);",
        "detail::multiply_aten(sum, own, b.narrow(1, first, count), 0, 1);",
        "ops/losses/test_linear_losses.py",
    ),
    Defect(
        "low-rank-addend-keeps-the-last-chunk-s-gradient", "csrc/gemm/adapters/low_rank.h",
        "addmm_(part.t(), t, 1, b_scale)", "addmm_(part.t(), t, 0, b_scale)",
        "ops/losses/test_linear_losses.py",
    ),
    Defect(
        "router-takes-the-last-of-equal-experts", "csrc/ops/moe/moe_router.cpp",
        "(best < 0 || by[j] > by[best])", "(best < 0 || by[j] >= by[best])",
        "ops/moe/test_moe_router.py",
    ),
    Defect(
        "router-z-gradient-misses-the-token-weight", "csrc/ops/moe/moe_router.cpp",
        "v += 2 * count * *z * r.lse * r.soft[j];", "v += 2 * *z * r.lse * r.soft[j];",
        "ops/moe/test_moe_router.py",
    ),
]  # fmt: skip

VOCAB_PARALLEL = [
    Defect(
        "split-cross-entropy-adds-sums-of-other-bases", "csrc/ops/losses/cross_entropy_cpu.cpp",
        "others += fact(rank, 1) * std::exp(fact(rank, 0) - top);", "others += fact(rank, 1);",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "split-cross-entropy-predicts-the-last-of-equals", "csrc/ops/losses/cross_entropy_cpu.cpp",
        "if (rank > 0 && !(value > highest)) continue;", "if (rank > 0 && !(value >= highest)) continue;",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "split-linear-loss-keeps-a-part-of-d-input", "csrc/ops/losses/linear/head.h",
        "        reduce(dx, row);\n", "",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "split-linear-cross-entropy-counts-one-buffer-of-two", "csrc/ops/losses/linear/fused_linear_cross_entropy_plan.cpp",
        "2 * of_chunk + of_tokens <= budget", "of_chunk + of_tokens <= budget",
        "distributed/test_vocab_parallel.py "
        "ops/losses/test_linear_losses.py",
    ),
    Defect(
        "split-low-rank-addend-keeps-a-partial-gradient", "csrc/ops/losses/linear/head.h",
        "if (division.shard.is_split() && of_t.defined())", "if (false)",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "reference-share-keeps-a-partial-gradient", "liger_ops/reference/_split.py",
        'return _wait(_collectives.all_reduce(grad.contiguous(), "sum", group.group_name))',
        "return grad.contiguous()",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "reference-join-gives-every-rank-the-first-part", "liger_ops/reference/_split.py",
        "grad.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()])", "grad.narrow(dim, 0, sizes[group.rank()])",
        "distributed/test_vocab_parallel.py",
    ),
    Defect(
        "reference-last-rank-has-negative-classes", "liger_ops/reference/_split.py",
        "max(0, min(each, classes - rank * each))", "min(each, classes - rank * each)",
        "distributed/test_vocab_parallel.py",
    ),
]  # fmt: skip

CORE_AND_RUNTIME = [
    Defect(
        "autograd-frees-tensors-of-a-retained-graph", "csrc/core/autograd.h",
        "return !keep_ && is_sole_owner(grad)", "return is_sole_owner(grad)",
        "ops/test_reuse.py ops/norms/test_rms_norm.py ops/test_every_operator.py",
    ),
    Defect(
        "autograd-overwrites-shared-storage", "csrc/core/autograd.h",
        "t.storage().use_count() == 1 && ", "",
        "ops/test_reuse.py",
    ),
    Defect(
        "autograd-cache-key-forgets-the-state", "csrc/core/autograd.h",
        "    add_to_cache_key(args, const_cast<BackwardNode*>(this)->self().state());\n", "",
        "ops/test_compiled_autograd.py",
    ),
    Defect(
        "narrow-rounds-ties-up", "csrc/core/cpu/half.h",
        "(bits + 0x7FFF + (bits >> 16 & 1)) >> 16", "(bits + 0x8000) >> 16",
        "ops/activations/test_relu_squared.py ops/gated/test_gated.py ops/norms/test_rms_norm.py",
    ),
    Defect(
        "launch-is-not-counted", "csrc/runtime/launch.cpp",
        "  kernel.count(function->source, variant);\n", "",
        "runtime/test_runtime_launches.py runtime/test_runtime_sources.py",
    ),
    Defect(
        "launch-of-an-empty-grid", "csrc/runtime/launch.cpp",
        "if (grid.x == 0 || grid.y == 0 || grid.z == 0) return {};", "if (grid.x == 0) return {};",
        "runtime/test_runtime_launches.py",
    ),
    Defect(
        "launch-does-not-retry-after-a-device-reset", "csrc/runtime/launch.cpp",
        "    result = attempt();\n  }", "  }",
        "runtime/test_runtime_launches.py runtime/test_runtime_sources.py",
    ),
    Defect(
        "loader-prefers-the-lowest-architecture", "csrc/runtime/loader.cpp",
        "return a->arch() > b->arch();", "return a->arch() < b->arch();",
        "runtime/test_runtime_sources.py runtime/test_packs.py",
    ),
    Defect(
        "loader-leaks-refused-modules", "csrc/runtime/loader.cpp",
        "    if (module) driver.cuModuleUnload(module);\n", "",
        "runtime/test_runtime_sources.py runtime/test_runtime_launches.py",
    ),
    Defect(
        "loader-compiles-while-preloading", "csrc/runtime/loader.cpp",
        "if (done(function) || !compile) return function;", "if (done(function)) return function;",
        "runtime/test_jit.py runtime/test_runtime_sources.py",
    ),
    Defect(
        "loader-takes-every-failure-for-permanent", "csrc/runtime/loader.cpp",
        "failure = {attempt.why_none(), !attempt.failure.empty()};", "failure = {attempt.why_none(), false};",
        "runtime/test_runtime_launches.py runtime/test_runtime_sources.py runtime/test_jit.py",
    ),
    Defect(
        "pack-of-a-newer-version-is-read", "csrc/runtime/pack.cpp",
        "if (header.version != kVersion)", "if (header.version < kVersion)",
        "runtime/test_packs.py",
    ),
    Defect(
        "pack-entry-may-end-outside", "csrc/runtime/pack.cpp",
        "e.stored <= bytes_ - e.offset && ", "",
        "runtime/test_packs.py",
    ),
    Defect(
        "pack-code-is-not-checked", "csrc/runtime/pack.cpp",
        "if (crc32(data_ + e.offset, e.stored) != e.checksum) return false;", "",
        "runtime/test_packs.py",
    ),
    Defect(
        "jit-cache-may-be-writable-by-a-group", "csrc/runtime/jit_cache.cpp",
        "(S_IWGRP | S_IWOTH)", "S_IWOTH",
        "runtime/test_jit.py",
    ),
    Defect(
        "jit-cache-key-forgets-the-architecture", "csrc/runtime/jit_cache.cpp",
        "(unsigned long long)hash, variant, arch);", "(unsigned long long)hash, variant, arch * 0);",
        "runtime/test_jit.py runtime/test_runtime_sources.py",
    ),
    Defect(
        "status-does-not-escape-backslashes", "csrc/runtime/status.cpp",
        "if (c == '\"' || c == '\\\\') out += '\\\\';", "if (c == '\"') out += '\\\\';",
        "runtime/test_runtime_launches.py runtime/test_runtime_sources.py",
    ),
    Defect(
        "preload-takes-the-start-of-a-word-for-a-name", "csrc/runtime/kernel.cpp",
        "(op.size() == size || op[size] == '_')", "true",
        "runtime/test_runtime_sources.py",
    ),
]  # fmt: skip

GEMM = [
    Defect(
        "plan-key-forgets-sustained", "csrc/gemm/plan.cpp",
        "p.ldc,  p.alignment,      p.sustained};", "p.ldc,  p.alignment,      0};",
        "ops/linear/test_gemm_plan.py",
    ),
    Defect(
        "plan-accepts-a-split-sum", "csrc/gemm/plan.cpp",
        "config<int>(lt, proposal.algorithm, kLtConfigSplitK) > 1;",
        "config<int>(lt, proposal.algorithm, kLtConfigSplitK) > 2;",
        "ops/linear/test_gemm_plan.py",
    ),
    Defect(
        "plan-swaps-rows-and-columns", "csrc/gemm/plan.cpp",
        "ceil_div(p.m, t.rows * t.cluster_rows) * ceil_div(p.n, t.columns * t.cluster_columns)",
        "ceil_div(p.n, t.rows * t.cluster_rows) * ceil_div(p.m, t.columns * t.cluster_columns)",
        "ops/linear/test_gemm_plan.py",
    ),
    Defect(
        "multiply-adds-the-old-value-twice", "csrc/gemm/multiply.h",
        "aligned_depth < depth ? 1 : beta", "aligned_depth < depth ? 1 + beta : beta",
        "ops/linear/test_gemm.py -k planned", thorough=True,
    ),
    Defect(
        "multiply-forgets-alpha-in-the-last-columns", "csrc/gemm/multiply.h",
        "multiply_aten(part, a_rows, b.narrow(1, aligned_columns, remainder), beta, alpha);",
        "multiply_aten(part, a_rows, b.narrow(1, aligned_columns, remainder), beta, 1);",
        "ops/linear/test_gemm.py -k planned", thorough=True,
    ),
]  # fmt: skip

KERNELS = [
    Defect(
        "kernel-rows-read-past-the-end", "liger_ops/kernels/rows.py",
        "mask=row_mask & (cols < n), other=0.0, volatile=volatile", "mask=row_mask, other=0.0, volatile=volatile",
        "kernels/test_every_kernel.py -k rms_norm",
    ),
    Defect(
        "kernel-rows-swap-strides", "liger_ops/kernels/rows.py",
        "offset = row.to(tl.int64) * inner_stride", "offset = row.to(tl.int64) * outer_stride",
        "kernels/test_every_kernel.py -k rms_norm",
    ),
    Defect(
        "kernel-gated-norm-reads-the-first-groups-weight", "liger_ops/kernels/norms/rms_norm_gated.py",
        "    weights = weight + first", "    weights = weight",
        "kernels/test_every_kernel.py -k rms_norm_gated",
    ),
    Defect(
        "kernel-gated-norm-forgets-the-activations-slope", "liger_ops/kernels/norms/rms_norm_gated.py",
        "tl.store(dgate, of_gate * slope,", "tl.store(dgate, of_gate,",
        "kernels/test_every_kernel.py -k rms_norm_gated",
    ),
    Defect(
        "kernel-rms-norm-drops-epsilon", "liger_ops/kernels/norms/rms_norm.py",
        "        scale = tl.rsqrt(row_mean(squares, n) + eps)\n        for t in tl.static_range(TILES):",
        "        scale = tl.rsqrt(row_mean(squares, n))\n        for t in tl.static_range(TILES):",
        "kernels/test_every_kernel.py -k rms_norm",
    ),
    Defect(
        "kernel-layer-norm-shares-overlap", "liger_ops/kernels/norms/layer_norm.py",
        "dbias_row = dweight_row + programs.to(tl.int64) * n", "dbias_row = dweight_row + programs.to(tl.int64)",
        "kernels/test_every_kernel.py -k layer_norm",
    ),
    Defect(
        "kernel-relu-squared-misses-the-factor", "liger_ops/kernels/activations/relu_squared.py",
        "tl.where(v <= 0, 0.0, 2 * v * d)", "tl.where(v <= 0, 0.0, v * d)",
        "kernels/test_every_kernel.py -k relu_squared",
    ),
    # Of launches, which need the interpreter too.
    Defect(
        "launch-layer-norm-swaps-gradients", "csrc/ops/norms/layer_norm_cuda.cpp",
        "{dweight, dbias}, flags::FINAL", "{dbias, dweight}, flags::FINAL",
        "kernels/test_every_kernel.py -k layer_norm",
    ),
    Defect(
        "launch-gated-norm-forgets-gate-first", "csrc/ops/norms/rms_norm_gated_cuda.cpp",
        " | (options.gate_first ? flags::GATE_FIRST : 0)", "",
        "kernels/test_every_kernel.py -k rms_norm_gated",
    ),
    Defect(
        "launch-sigmoid-gate-drops-the-residual", "csrc/ops/gated/sigmoid_gate.cpp",
        ".flags = residual.defined() ? flags::HAS_RESIDUAL : 0};", ".flags = 0};",
        "kernels/test_every_kernel.py -k sigmoid_gate",
    ),
    Defect(
        "launch-hyper-post-leaves-a-gradient-unwritten", "csrc/ops/hyper/hyper_post.cpp",
        "(out.streams.defined() ? constants::NEEDS_DSTREAMS : 0)", "0",
        "kernels/test_every_kernel.py -k hyper_post",
    ),
    Defect(
        "kernel-embedding-ignores-padding", "liger_ops/kernels/embedding/embedding.py",
        "if (mine != before) & (mine != padding_idx):", "if mine != before:",
        "kernels/test_every_kernel.py -k 'embedding or share_a_row'",
    ),
    Defect(
        "kernel-embedding-adds-what-was-lost", "liger_ops/kernels/embedding/embedding.py",
        "addend = found[i].to(tl.float32) - lost", "addend = found[i].to(tl.float32) + lost",
        "kernels/test_every_kernel.py -k 'embedding or share_a_row'",
    ),
    Defect(
        "kernel-rope-inverse-keeps-the-halves", "liger_ops/kernels/rope/rope.py",
        "tl.where(inverse, -sin_b, sin_a), tl.where(inverse, -sin_a, sin_b)",
        "tl.where(inverse, -sin_a, sin_a), tl.where(inverse, -sin_b, sin_b)",
        "kernels/test_every_kernel.py -k rope",
    ),
    Defect(
        "kernel-swiglu-slope-has-the-wrong-sign", "liger_ops/kernels/gated/swiglu.py",
        "d * u * (s + g * slope)", "d * u * (s - g * slope)",
        "kernels/test_every_kernel.py -k 'swiglu or gated'",
    ),
    Defect(
        "kernel-cross-entropy-mean-has-one-divisor", "liger_ops/kernels/losses/_gradient.py",
        "by_count = tl.load(totals + 1, mask=mean, other=1.0)", "by_count = tl.load(totals, mask=mean, other=1.0)",
        "kernels/test_every_kernel.py -k cross_entropy",
    ),
    Defect(
        "kernel-cross-entropy-checks-a-ranks-classes", "liger_ops/kernels/losses/cross_entropy.py",
        "        is_class = (y >= 0) & (y < classes)\n        y -= first_class\n",
        "        y -= first_class\n        is_class = (y >= 0) & (y < classes)\n",
        "kernels/test_every_kernel.py -k two_ranks",
    ),
    Defect(
        "kernel-router-adds-a-second-that-is-missing", "liger_ops/kernels/moe/moe_router.py",
        "both = first + tl.where(group_size > 1, second, 0.0)", "both = first + second",
        "kernels/test_every_kernel.py -k moe_router",
    ),
    Defect(
        "kernel-router-allows-too-many-choices", "liger_ops/kernels/moe/moe_router.py",
        "MOST_CHOICES = tl.constexpr(32)", "MOST_CHOICES = tl.constexpr(64)",
        "ops/moe/test_moe_router.py ops/test_reference.py", generates=True,
    ),
]  # fmt: skip

FP8_HYBRID_ADAPTERS = [
    Defect(
        "rows-in-e4m3-hide-nan", "csrc/gemm/e4m3/rows.cpp",
        "peak = v > peak || v != v ? v : peak;", "peak = v > peak ? v : peak;",
        "ops/quantize",
    ),
    Defect(
        "fp8-gradients-of-a-group-are-those-of-its-first-weight", "csrc/ops/linear/fp8.cpp",
        "const Tensor rows = q.narrow_symint(0, first, count);", "const Tensor rows = q.narrow_symint(0, 0, count);",
        "ops/linear/test_fp8_projections.py",
    ),
    Defect(
        "fp8-linear-takes-routers", "liger_ops/transformers/linears.py",
        'elif path.rpartition(".")[2] in ROUTERS:', 'elif path in ROUTERS:',
        "transformers/test_transformers_linears.py",
    ),
    Defect(
        "fp8-linear-takes-any-size", "liger_ops/transformers/linears.py",
        "if any(size % multiple for size in sizes):", "if all(size % multiple for size in sizes):",
        "transformers/test_transformers_linears.py",
    ),
    Defect(
        "kernel-quantised-rows-forget-a-tile", "liger_ops/kernels/quantize/quantize_rows.py",
        "peak = tl.maximum(peak, magnitude(tiles[t]))", "peak = magnitude(tiles[t])",
        "kernels/test_quantizers.py kernels/test_every_kernel.py -k quantize",
    ),
    Defect(
        "convolution-gradient-crosses-samples", "csrc/ops/conv/causal_conv1d_cpu.cpp",
        "if (later < 0 || !a.row(batch, later, t)) continue;", "if (later < 0 || later >= a.length) continue;",
        "ops/conv",
    ),
    Defect(
        "delta-gates-rate-gradient-forgets-the-bias", "csrc/ops/gated/delta_gates.cpp",
        "of_rate[i] += du * u,", "of_rate[i] += du * a[i],",
        "ops/gated/test_delta_gates.py",
    ),
    Defect(
        "kernel-short-conv-counts-rows-of-the-next-share", "liger_ops/kernels/conv/short_conv.py",
        "counted = tl.where(own, dv, 0.0)", "counted = dv",
        "kernels/test_every_kernel.py -k short_conv",
    ),
    Defect(
        "log-probs-round-logits-for-gradients", "csrc/ops/losses/linear/fused_linear_log_probs.h",
        "return by_gemm ? own() : compute_type(head.x());", "return own();",
        "ops/losses/test_fused_linear_log_probs.py",
    ),
    Defect(
        "kernel-gradients-forget-the-tiles-largest", "liger_ops/kernels/losses/log_probs.py",
        "x += tl.load(peaks + (cols - skew) // TILE * SHARE, mask=mask, other=other)", "x += 0",
        "kernels/test_statistics_kernels.py",
    ),
    Defect(
        "kernel-parameters-are-never-wide", "liger_ops/kernels/elements.py",
        "is_wide = wide.to(tl.int64) != 0", "is_wide = wide.to(tl.int64) == 0",
        "kernels/test_every_kernel.py -k wide_parameters", thorough=True,
    ),
    Defect(
        "kernel-xielu-slope-ignores-the-bound", "liger_ops/kernels/activations/xielu.py",
        "tl.where(v > eps, -1.0, rise), ", "rise, ",
        "kernels/test_every_kernel.py -k xielu",
    ),
    Defect(
        "kernel-lora-pieces-repeat-the-middle", "liger_ops/kernels/linear/lora_linear.py",
        "low = (rest - middle.to(tl.float32)).to(tl.bfloat16)", "low = rest.to(tl.bfloat16)",
        "kernels/test_every_kernel.py -k 'lora or adapters'",
    ),
    Defect(
        "lora-drops-the-same-columns-of-every-row", "csrc/gemm/adapters/lora_dropout.h",
        "mixed(uint32_t(row) ^ first_word) + second_word;", "mixed(first_word) + second_word;",
        "ops/linear/test_projections.py ops/linear/test_lora_linear.py transformers/test_transformers_lora.py",
    ),
    Defect(
        "lora-reads-four-bits-of-another-dtype", "liger_ops/linear/packed.py",
        "if computes != dtype:", "if computes is None:",
        "transformers/test_transformers_lora_quantised.py transformers/test_transformers_lora_reasons.py",
    ),
    Defect(
        "rule-lora-gradients-of-adapters-are-not-summed", "liger_ops/distributed/rules/lora_linear.py",
        "[Partial() if isinstance(p, Shard) else R for p in self.rows]", "[R for p in self.rows]",
        "distributed/test_dtensor.py",
    ),
]  # fmt: skip

DTENSOR = [
    Defect(
        "rule-rms-norm-weight-gradient-is-not-summed", "liger_ops/distributed/rules/rms_norm.py",
        "if_wanted(wanted, rows, summed(rows))", "if_wanted(wanted, rows, R)",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-layer-norm-shards-the-wrong-dimension", "liger_ops/distributed/rules/layer_norm.py",
        "Shard(rows.dim + 1)", "Shard(rows.dim)",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-reduces-any-partial-sum", "liger_ops/distributed/_sharding.py",
        "return name in self.reduced", "return True",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-mm-multiplies-partial-sums", "liger_ops/distributed/rules/mm.py",
        "    yield [SUM], dict(a=SUM, b=R)\n",
        "    yield [SUM], dict(a=SUM, b=R)\n    yield [SUM], dict(a=SUM, b=SUM)\n",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-divergence-divides-by-every-batch", "liger_ops/distributed/rules/divergence.py",
        "divisor = R if first_only and rows != Shard(0) else summed(rows)", "divisor = summed(rows)",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-cross-entropy-shards-classes-twice", "liger_ops/distributed/rules/cross_entropy.py",
        "if p.is_partial() or (p == by_class and split is not None):", "if p.is_partial():",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-embedding-forgets-padding", "liger_ops/distributed/rules/embedding.py",
        "embedding_dense_backward(dout, input, classes, padding_idx, False)",
        "embedding_dense_backward(dout, input, classes, -1, False)",
        "distributed/test_dtensor.py",
    ),
    Defect(
        "rule-losses-sum-totals-over-one-dimension", "liger_ops/distributed/_losses.py",
        "        for i in self.sharded:\n", "        for i in self.sharded[:1]:\n",
        "distributed/test_dtensor.py",
    ),
]  # fmt: skip

REFERENCE = [
    Defect(
        "reference-z-loss-counts-ignored-tokens", "liger_ops/reference/cross_entropy.py",
        "return losses.view(target.shape), z.masked_fill(target == ignore_index, 0)",
        "return losses.view(target.shape), z",
        "ops/test_reference.py ops/losses/test_cross_entropy.py",
    ),
    Defect(
        "reference-router-opens-one-group-more", "liger_ops/reference/moe_router.py",
        "(rank >= top_groups)", "(rank > top_groups)",
        "ops/moe/test_moe_router.py",
    ),
    Defect(
        "reference-rms-norm-has-another-default", "liger_ops/reference/rms_norm.py",
        "eps: float = 1e-6", "eps: float = 1e-5",
        "ops/test_reference.py ops/test_registration.py ops/test_functional.py ops/test_every_operator.py",
    ),
    Defect(
        "declaration-layer-norm-swaps-batch-dimensions", "liger_ops/reference/layer_norm.py",
        "forward_out_dims=(0, 1)", "forward_out_dims=(0, 0)",
        "ops/test_func.py",
    ),
    Defect(
        "vmap-shares-a-batched-parameter", "liger_ops/_runtime/vmap.py",
        "one_by_one = any(map(is_batched, in_dims[rows:])) or any(", "one_by_one = any(",
        "ops/test_func.py",
    ),
]  # fmt: skip

PATCHING = [
    Defect(
        "probe-ignores-dropout", "liger_ops/transformers/probe.py",
        "if any(isinstance(m, nn.Dropout) and m.p > 0 for other in others for m in other.modules()):", "if False:",
        "transformers/test_transformers_patching.py transformers/test_transformers.py",
    ),
    Defect(
        "probe-accepts-a-norm-that-clamps", "liger_ops/transformers/probe.py",
        "(20 * random_tensor(n, seed=7 + i)).to(dtype)", "random_tensor(n, seed=7 + i).to(dtype)",
        "transformers/test_transformers_patching.py transformers/test_transformers_head_norms.py",
    ),
    Defect(
        "mixtures-ignore-gradients", "liger_ops/transformers/hyper_layers.py",
        "if not all(map(probe.agrees, *gradients)):", "if False:",
        "transformers/test_transformers_hyper_layers.py",
    ),
    Defect(
        "mixtures-take-autocast", "liger_ops/transformers/hyper_layers.py",
        "return comb is None or autocast_dtype(streams) is None", "return True",
        "transformers/test_transformers_hyper_layers.py",
    ),
    Defect(
        "queries-that-change-rotate-as-a-whole", "liger_ops/transformers/latent_heads.py",
        "if written or rewrite.is_read_later", "if rewrite.is_read_later",
        "transformers/test_rewritten_statements.py",
    ),
    Defect(
        "joins-ignore-shapes", "liger_ops/transformers/latent_heads.py",
        "if a.shape == (*shape[:-1], first) and b.shape == (*shape[:-1], shape[-1] - first):", "if True:",
        "transformers/test_transformers_latent_heads.py",
    ),
    Defect(
        "rewrite-ignores-hooks-of-a-norm", "liger_ops/transformers/rewrite.py",
        ' or "forward" in norm.__dict__ or has_hooks(norm):', ' or "forward" in norm.__dict__:',
        "transformers/test_rewrite.py transformers/test_transformers_wrappers.py",
    ),
    Defect(
        "rewrite-shares-an-input-that-changes", "liger_ops/transformers/rewrite.py",
        "if any(may_change(statement, argument) for statement in block[first:last]):", "if False:",
        "transformers/test_rewritten_statements.py",
    ),
    Defect(
        "rewrite-allows-in-place-additions", "liger_ops/transformers/rewrite.py",
        "if isinstance(node, ast.AugAssign) and is_name(node.target, name):", "if False:",
        "transformers/test_rewritten_statements.py",
    ),
    Defect(
        "head-defers-for-other-threads", "liger_ops/transformers/heads.py",
        "if mode is None or args or kwargs or not mode.is_of_this_thread():", "if mode is None or args or kwargs:",
        "transformers/test_transformers_logits.py transformers/test_transformers_wrappers.py",
    ),
    Defect(
        "head-stays-deferring-after-an-error", "liger_ops/transformers/heads.py",
        "        try:\n            out = cls.forward(self, *args, **kwargs)\n        finally:\n            head.liger_mode = None\n",
        "        out = cls.forward(self, *args, **kwargs)\n        head.liger_mode = None\n",
        "transformers/test_transformers_logits.py transformers/test_transformers_wrappers.py "
        "transformers/test_transformers_patching.py",
    ),
    Defect(
        "head-ignores-hooks", "liger_ops/transformers/heads.py",
        'hooked = "its head has hooks" if has_other_hooks(head) else ""', 'hooked = ""',
        "transformers/test_transformers_heads.py transformers/test_transformers_logits.py",
    ),
    Defect(
        "mlp-ignores-the-factor-of-its-result", "liger_ops/transformers/probe.py",
        "    return lambda self, x: times(inner(self, x), self, last)\n", "    return inner\n",
        "transformers/test_transformers_mlps.py",
    ),
    Defect(
        "coverage-counts-what-is-left-alone", "liger_ops/transformers/coverage.py",
        "for row in rows if row.replacement for p in", "for row in rows for p in",
        "transformers/test_transformers_coverage.py",
    ),
    Defect(
        "fallbacks-share-the-state-of-samples", "liger_ops/transformers/convolutions.py",
        "y = None if compiling else separated(", "y = None if compiling or True else separated(",
        "transformers/test_transformers_packing.py",
    ),
    Defect(
        "patched-classes-forget-their-options", "liger_ops/transformers/patched.py",
        "    cls = type(module)\n    reads = NOTHING", "    cls, key = type(module), None\n    reads = NOTHING",
        "transformers/test_transformers_patching.py",
    ),
    Defect(
        "norm-keeps-a-wider-result", "liger_ops/transformers/modules.py",
        "return y if y.dtype == dtype else y.to(dtype)", "return y",
        "transformers/test_transformers_patching.py transformers/test_transformers.py",
    ),
    Defect(
        "mlp-ignores-its-switch", "liger_ops/transformers/patch.py",
        "        require_switch(switches, switch(found))\n", "",
        "transformers/test_transformers_patching.py",
    ),
    Defect(
        "experts-round-their-weights", "liger_ops/transformers/experts.py",
        "if weight.dtype not in (dtype, torch.float32):", "if weight.dtype != dtype:",
        "transformers/test_transformers_experts.py",
    ),
    Defect(
        "projections-ignore-a-replaced-forward", "liger_ops/linear/layers.py",
        '\n        or "forward" in module.__dict__\n', "\n",
        "ops/linear/test_projections.py transformers/test_transformers_wrappers.py",
    ),
    Defect(
        "lora-adds-merged-adapters", "liger_ops/linear/peft.py",
        "    if layer.disable_adapters or merged:\n", "    if layer.disable_adapters:\n",
        "transformers/test_transformers_lora.py",
    ),
    Defect(
        "lora-ignores-dropout", "liger_ops/linear/peft.py",
        "if type(dropout) is nn.Dropout and dropout.training else 0.0", "if False else 0.0",
        "transformers/test_transformers_lora.py",
    ),
    Defect(
        "lora-drops-the-gradient-of-a-called-base", "liger_ops/linear/adapters.py",
        "if weight is None and needed[1 + count + i]:", "if False:", "ops/linear/test_lora_linear.py",
    ),
    Defect(
        "lora-calls-a-base-without-its-hooks", "liger_ops/linear/project.py",
        "[layer and layer.layer(x) for layer in called]", "[layer and layer.layer.forward(x) for layer in called]",
        "transformers/test_transformers_lora_bases.py",
    ),
    Defect(
        "lora-rounds-adapters-beside-a-wider-result", "liger_ops/linear/peft.py",
        "return wide if all(t.dtype == wide == torch.float32 for t in adapters) else dtype", "return dtype",
        "transformers/test_transformers_lora_bases.py",
    ),
    Defect(
        "lora-changes-the-dtype-of-a-base-s-result", "liger_ops/linear/project.py",
        "y = y.to(results[i].dtype) if state.weight.keeps_dtype else y", "pass",
        "transformers/test_transformers_lora_bases.py",
    ),
    Defect(
        "lora-adds-to-results-of-other-rows", "csrc/ops/linear/lora_linear.cpp",
        "result->dim() == x.dim() && rows(*result).equals(rows(x)), op", "result->dim() > 0, op",
        "ops/linear/test_lora_linear.py",
    ),
    Defect(
        "lora-ignores-hooks-of-a-layer", "liger_ops/linear/project.py",
        'return is_lora(module) and (has_hooks(module) or "forward" in module.__dict__)', "return False",
        "transformers/test_transformers_lora_reasons.py",
    ),
    Defect(
        "lora-adds-adapters-that-the-switch-forbids", "liger_ops/transformers/patch.py",
        'lora=switches["lora"])', "lora=True)", "transformers/test_transformers_lora_reasons.py",
    ),
    Defect(
        "adapted-heads-ignore-hooks", "liger_ops/transformers/heads.py",
        "    if hooked or has_adapters(head) or is_fully_sharded(head):\n        return hooked\n",
        "    if hooked or has_adapters(head) or is_fully_sharded(head):\n        return '' if has_adapters(head) else hooked\n",
        "transformers/test_transformers_lora_heads.py",
    ),
    Defect(
        "adapted-heads-ignore-dropout", "liger_ops/transformers/heads.py",
        "low_rank_input(x, a, scale, dropout)", "low_rank_input(x, a, scale)",
        "transformers/test_transformers_lora.py",
    ),
    Defect(
        "deep-copies-lose-a-wrapper", "liger_ops/transformers/patched.py",
        "    if wanted is not module:\n", "    if False:\n", "transformers/test_transformers_lora.py",
    ),
]  # fmt: skip

COMPAT_AND_LOSSES = [
    Defect(
        "reference-models-take-the-policy-s-adapter", "liger_ops/losses/_sequences.py",
        'for name, value in head.items() if not name.startswith("low_rank_")}', "for name, value in head.items()}",
        "losses/test_every_loss.py",
    ),
    Defect(
        "compat-gemma-norm-loses-its-offset", "liger_ops/compat/signatures.py",
        "offset=1.0, casting_mode='gemma', init_fn='zeros'", "offset=0.0, casting_mode='gemma', init_fn='zeros'",
        "compat/test_compat_models.py",
    ),
    Defect(
        "compat-dpo-smooths-every-type", "liger_ops/compat/chunked_loss.py",
        'label_smoothing=label_smoothing if loss_type in ("exo_pair", "robust") else 0.0',
        "label_smoothing=label_smoothing",
        "compat/test_compat_chunked_loss.py",
    ),
    Defect(
        "compat-leaves-modules-after-uninstall", "liger_ops/compat/finder.py",
        "    for name in imported():\n        del sys.modules[name]\n", "",
        "compat/test_compat.py compat/test_compat_models.py",
    ),
    Defect(
        "compat-sparsemax-counts-ties-at-the-threshold-twice", "liger_ops/compat/formulas/activations.py",
        "support = (ordered * count > above)", "support = (ordered * (count - 1) > above - 1)",
        "compat/test_compat_formulas.py",
    ),
    Defect(
        "compat-sinkhorn-ends-with-rows", "liger_ops/compat/formulas/hyper_connections.py",
        "for _ in range(tmax - 1):", "for _ in range(tmax - 2):",
        "compat/test_compat_formulas.py",
    ),
    Defect(
        "compat-formulas-compute-in-the-dtype-of-the-input", "liger_ops/compat/formulas/activations.py",
        "    wide, weights = widened(x), widened(weight)\n", "    wide, weights = x, weight\n",
        "compat/test_compat_formulas.py",
    ),
    Defect(
        "compat-odd-heads-rotate-one-column-too-many", "liger_ops/compat/ops.py",
        "rotary_dim = 2 * (min(cos.shape[-1], q.shape[-1]) // 2)", "rotary_dim = min(cos.shape[-1], q.shape[-1])",
        "compat/test_compat_helpers.py",
    ),
    Defect(
        "compat-base-of-distillation-sums-in-bf16", "liger_ops/compat/bases.py",
        "torch.zeros_like(widened(t))", "torch.zeros_like(t)",
        "compat/test_compat_bases.py",
    ),
    Defect(
        "compat-modules-miss-names-that-they-import", "liger_ops/compat/modules.py",
        'return ["CrossEntropyOutput", *MODULES["ops"]]', "return []",
        "compat/test_compat_names.py",
    ),
    Defect(
        "grpo-clips-both-sides-alike", "liger_ops/losses/grpo.py",
        "ratio.clamp(1 - epsilon_low, 1 + epsilon_high)", "ratio.clamp(1 - epsilon_low, 1 + epsilon_low)",
        "losses/test_losses_grpo.py",
    ),
    Defect(
        "grpo-counts-the-wrong-side-as-clipped", "liger_ops/losses/grpo.py",
        "low & (advantages < 0) | high & (advantages > 0)", "low & (advantages > 0) | high & (advantages < 0)",
        "losses/test_losses_grpo.py",
    ),
    Defect(
        "grpo-keeps-masked-log-probs", "liger_ops/losses/grpo.py",
        "(None if t is None else t.masked_fill(mask == 0, 0) for t in (old_log_probs, ref_log_probs))",
        "(old_log_probs, ref_log_probs)",
        "losses/test_losses_grpo.py",
    ),
    Defect(
        "dpo-robust-is-not-normalised", "liger_ops/losses/preference.py",
        "(1 - eps) * logsigmoid(margin)) / (1 - 2 * eps)", "(1 - eps) * logsigmoid(margin))",
        "losses/test_losses_preference.py",
    ),
    Defect(
        "kto-rewards-undesirable-sequences", "liger_ops/losses/kto.py",
        "torch.sigmoid(-beta * above)", "torch.sigmoid(beta * above)",
        "losses/test_losses_preference.py",
    ),
    Defect(
        "sequences-average-over-padding", "liger_ops/losses/_sequences.py",
        "total / (target != ignore_index).sum(-1) if average", "total / target.shape[-1] if average",
        "losses/test_losses_preference.py",
    ),
]  # fmt: skip

PACKAGING = [
    Defect(
        "pack-checksum-covers-the-decoded-code", "liger_ops/aot/pack.py",
        "checksum = 0, zlib.crc32(blob)", "checksum = 0, zlib.crc32(block[0].binary)",
        "runtime/test_packs.py",
    ),
    Defect(
        "archs-serve-integrated-gpus-by-family", "liger_ops/aot/archs.py",
        "return family[-1] if family and not integrated else capability",
        "return family[-1] if family else capability",
        "packaging/test_build.py",
    ),
    Defect(
        "compile-cache-key-forgets-warps", "liger_ops/aot/compile.py",
        "        str(variant.config.num_warps),\n", "",
        "packaging/test_build.py -k 'recompile or edit or option or key or cache'",
    ),
    Defect(
        "compile-allows-a-build-path", "liger_ops/aot/compile.py",
        'demand(variant, str(Path(__file__).parents[2]).encode() not in blob, "carries a build path")', "pass",
        "packaging/test_build.py -k path",
    ),
    Defect(
        "release-accepts-any-torch", "liger_ops/aot/torch_release.py",
        "missing = [minor for minor in minors if library_name(minor) not in present]", "missing = []",
        "packaging/test_release.py -k required_library", thorough=True,
    ),
    Defect(
        "release-accepts-any-machine", "liger_ops/aot/manylinux.py", "!= machine.elf:", "== -1:",
        "packaging/test_machines.py",
    ),
    Defect(
        "release-downloads-torch-of-this-machine", "liger_ops/aot/torch_release.py", 'f"{version}-{machine.name}"', "version",
        "packaging/test_machines.py packaging/test_release.py",
    ),
]  # fmt: skip

DEFECTS = [
    *OPERATORS, *VOCAB_PARALLEL, *CORE_AND_RUNTIME, *GEMM, *KERNELS, *FP8_HYBRID_ADAPTERS, *DTENSOR, *REFERENCE,
    *PATCHING, *COMPAT_AND_LOSSES, *PACKAGING,
]  # fmt: skip
