#pragma once

// The loop over chunks of tokens below fused_linear_cross_entropy, on CPU and CUDA.
//
// M tokens, H hidden, V classes. A chunk of T tokens costs three matrix products (logits, d input, d weight) around the
// rows of cross_entropy, all in one buffer of T x V logits that its gradient overwrites; some need no such rows, see
// exponentials.h. What T decides: small chunks are slow products that read and write d weight once each; large ones are
// memory.

#include <ATen/ATen.h>

#include "core/cross_entropy.h"
#include "core/exponentials.h"
#include "core/products.h"
#include "kernels/fused_linear_cross_entropy.h"

namespace liger::core::linear_cross_entropy {

using namespace core::cross_entropy;

/// What the caller asks for beside the loss.
struct Wanted {
  bool metrics = false, log_probs = false, input = false, weight = false, bias = false;

  bool any_gradient() const { return input || weight || bias; }
  int64_t bits() const { return metrics | log_probs << 1 | input << 2 | weight << 3 | bias << 4; }
  static Wanted from_bits(int64_t bits) {
    auto bit = [&](int i) { return bool(bits >> i & 1); };
    return {bit(0), bit(1), bit(2), bit(3), bit(4)};
  }
  const char* op() const {
    return metrics  ? "fused_linear_cross_entropy_with_metrics"
        : log_probs ? "fused_linear_cross_entropy_with_log_probs"
                    : "fused_linear_cross_entropy";
  }
};

struct Settings {
  Options o;
  double logits_scale;
  OptionalTensor token_weight;
  std::optional<int64_t> memory_budget;
};

struct Gradients {
  Tensor input, weight, bias;
};

/// late: what the gradients have yet to be multiplied by, (that of input, those of weight and bias); undefined: 1.
struct Forward {
  Results rows;
  Tensor log_probs, entropy, late;
  Gradients gradients;
};

inline Settings check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    const OptionalTensor& ce_weight, c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, double logits_scale, const OptionalTensor& token_weight,
    std::optional<int64_t> memory_budget) {
  check_activation(op, "input", input);
  check_dense(op, "weight", weight);
  check_same_device(op, "weight", weight, "input", input);
  LIGER_CHECK(
      weight.scalar_type() == input.scalar_type(), op, "weight",
      c10::str("have the dtype of input, ", input.scalar_type()), weight.scalar_type());
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, "weight",
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of input"),
      weight.sym_sizes());
  const auto classes = weight.sym_size(0);
  check_dense(op, "target", target);
  check_same_device(op, "target", target, "input", input);
  LIGER_CHECK(
      target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, op, "target",
      "be int64 or int32 class indices", target.scalar_type());
  auto tokens = input.sym_sizes().slice(0, input.dim() - 1);
  auto check_tokens = [&](const char* name, const Tensor& t) {
    LIGER_CHECK(
        t.sym_sizes().equals(tokens), op, name,
        c10::str("have shape ", tokens, ", that of input without its last dimension"), t.sym_sizes());
  };
  check_tokens("target", target);
  auto check_classes = [&](const char* name, const OptionalTensor& t, bool float_too) {
    if (!t || !t->defined()) return;
    check_dense(op, name, *t);
    check_same_device(op, name, *t, "input", input);
    auto dtype = t->scalar_type(), like = input.scalar_type();
    LIGER_CHECK(
        dtype == like || (float_too && dtype == at::kFloat && like != at::kDouble), op, name,
        c10::str(float_too ? "be float32 or " : "", "have the dtype of input, ", like), dtype);
    LIGER_CHECK(
        t->dim() == 1 && t->sym_size(0) == classes, op, name, c10::str("have shape [", classes, "], one value a class"),
        t->sym_sizes());
  };
  check_classes("bias", bias, false);
  check_classes("ce_weight", ce_weight, true);
  if (token_weight && token_weight->defined()) {
    check_dense(op, "token_weight", *token_weight);
    check_same_device(op, "token_weight", *token_weight, "input", input);
    LIGER_CHECK(
        at::isFloatingType(token_weight->scalar_type()), op, "token_weight", "be floating point",
        token_weight->scalar_type());
    check_tokens("token_weight", *token_weight);
  }
  LIGER_CHECK(std::isfinite(logits_scale), op, "logits_scale", "be finite", logits_scale);
  LIGER_CHECK(
      !memory_budget || *memory_budget > 0, op, "memory_budget", "be a positive number of bytes", *memory_budget);
  auto o = cross_entropy::parse(op, reduction, ignore_index, label_smoothing, lse_square_scale, softcap);
  return {o, logits_scale, token_weight, memory_budget};
}

// ---- What a call will take

struct Plan {
  int64_t chunk = 1, chunks = 0;  // tokens a chunk
  int64_t row;  // elements from one row of logits to the next: whole cache lines, which matrix products want
  int64_t bytes;  // of everything that lives no longer than the call
};

/// Whether d weight is summed apart from the targets' part, see liger_ops/kernels/fused_linear_cross_entropy.py.
inline bool takes_targets(at::ScalarType dtype, int64_t chunks, const Wanted& wanted) {
  return wanted.weight && chunks > 1 && at::isReducedFloatingType(dtype);
}

inline Plan make_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget) {
  constexpr int64_t kMiB = 1 << 20, kTile = 256;
  const int64_t element = c10::elementSize(dtype), line = 128 / element;
  Plan plan;
  plan.row = (classes + line - 1) / line * line;
  // Statistics and what programs of a row exchange; losses of all tokens, and what a sort of their targets takes.
  // Without gradients, sums of exponentials have nobody's rows to lie in.
  const bool has_sums = dtype == at::kBFloat16 && !wanted.any_gradient();
  const int64_t sums = has_sums ? Exponentials::bytes_of_sums(classes) : 0;
  const int64_t per_row = plan.row * element + 16 + (classes + 1023) / 1024 + sums;
  const int64_t per_token = 16 + (takes_targets(dtype, 2, wanted) ? 40 : 0);
  // Enough for products that run at full speed; without gradients less will do.
  const int64_t usual = (wanted.any_gradient() ? 1280 : 320) * kMiB + tokens * per_token;
  const int64_t budget = memory_budget.value_or(std::max(usual, per_row * kTile / 2 + tokens * per_token));
  const int64_t least = tokens * per_token + per_row;
  LIGER_CHECK(
      budget >= least || tokens == 0, op, "memory_budget",
      c10::str("be at least ", least, " bytes for the logits of one of ", tokens, " tokens"), budget);
  int64_t most = std::min<int64_t>((budget - tokens * per_token) / per_row, 8192);
  // cuBLAS cuts products of this size into pairs of tiles, 256 tokens: 768 a chunk take less time than 832 or 896, and
  // 1280 than 1408 (H200, 4096 x 128256 and 3584 x 151936).
  const int64_t tile = most < 2 * kTile ? kTile / 4 : kTile;
  if (most > tile) most = most / tile * tile;
  if (tokens > 0) {
    plan.chunks = (tokens + most - 1) / most;
    // Chunks of one size: none is a remainder that runs slowly.
    plan.chunk = (tokens + plan.chunks - 1) / plan.chunks;
    if (plan.chunks > 1) plan.chunk = std::min(most, (plan.chunk + tile - 1) / tile * tile);
    plan.chunks = (tokens + plan.chunk - 1) / plan.chunk;
  }
  plan.bytes =
      std::min(plan.chunk, tokens) * per_row + tokens * (16 + (takes_targets(dtype, plan.chunks, wanted) ? 40 : 0));
  return plan;
}

/// (tokens a chunk, chunks, bytes of workspace, bytes of gradients)
inline std::tuple<int64_t, int64_t, int64_t, int64_t> describe_plan(
    int64_t tokens, int64_t hidden, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget) {
  const char* op = "fused_linear_cross_entropy_plan";
  LIGER_CHECK(
      tokens >= 0 && hidden > 0 && classes > 0, op, "the sizes", "be positive",
      c10::str(tokens, " tokens, ", hidden, " hidden, ", classes, " classes"));
  LIGER_CHECK(at::isFloatingType(dtype), op, "dtype", "be floating point", dtype);
  Plan plan = make_plan(op, tokens, classes, dtype, wanted, memory_budget);
  const int64_t gradients =
      (wanted.input ? tokens * hidden : 0) + (wanted.weight ? classes * hidden : 0) + (wanted.bias ? classes : 0);
  return {plan.chunk, plan.chunks, plan.bytes, gradients * int64_t(c10::elementSize(dtype))};
}

// ---- Results

inline Gradients empty_gradients(const Tensor& input, const Tensor& weight, const Tensor& bias, Wanted wanted) {
  auto like = [](bool asked, const Tensor& t, at::MemoryFormat format) {
    return asked ? at::empty_like(t, t.options().memory_format(format)) : Tensor();
  };
  return {
      like(wanted.input, input, at::MemoryFormat::Contiguous), like(wanted.weight, weight, at::MemoryFormat::Preserve),
      like(wanted.bias, bias, at::MemoryFormat::Contiguous)};
}

inline Forward empty_forward(
    const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias, const Settings& s,
    Wanted wanted) {
  Forward out;
  const bool again = wanted.any_gradient() && !s.o.reduced();
  out.rows = empty_results(input, target, s.o, {wanted.metrics, again});
  auto numbers = out.rows.loss.options();
  if (wanted.log_probs) {
    out.log_probs = at::empty_symint(target.sym_sizes(), numbers);
    out.entropy = at::empty_symint(target.sym_sizes(), numbers);
  }
  if (s.o.reduced()) {
    out.gradients = empty_gradients(input, weight, bias, wanted);
    if (wanted.any_gradient() && input.scalar_type() == at::kHalf) out.late = at::empty({2}, numbers);
  }
  return out;
}

/// A dense tensor as the fewest rows that the scaling kernel's 32-bit columns admit.
inline Tensor as_long_rows(const Tensor& t) {
  Tensor flat = t.dim() == 2 && t.stride(0) == 1 ? t.t() : t;
  if (!flat.is_contiguous()) return t;
  if (flat.numel() < std::numeric_limits<int32_t>::max()) return flat.view({1, -1});
  return flat.view({-1, flat.size(-1)});
}

// ---- Devices: the rows of one call

/// Targets as classes, int32; -1 where there is none.
inline Tensor classes_of(const Tensor& target, int64_t n, const Options& o) {
  Tensor y = target.to(at::kLong);
  return y.masked_fill((y < 0) | (y >= n) | (y == o.ignore_index), -1).to(at::kInt);
}

/// (classes in ascending order, the row that each belongs to), as order_targets of the kernels finds them.
inline std::tuple<Tensor, Tensor> sort_targets(const Tensor& target, int64_t n, const Options& o) {
  // A statement of its own: what it takes is free again before the sort, which takes most.
  Tensor unsorted = classes_of(target, n, o);
  auto [classes, order] = unsorted.sort(/*stable=*/true, 0, false);
  return {classes, order.to(at::kInt)};
}

struct Cpu {
  struct Rows {
    const char* op;
    int64_t n;
    Tensor target, weight;
    Options o;

    Rows(const char* name, int64_t classes, const Tensor& targets, const Tensor& ce_weight, const Options& options)
        : op(name), n(classes), target(class_indices(targets)), weight(ce_weight), o(options) {
      runtime::count_cpu_call();
      check_classes(op, target.const_data_ptr<int64_t>(), target.numel(), n, o);
    }
    Tensor part(int64_t first, const Tensor& logits) const { return target.narrow(0, first, logits.size(0)); }

    void count(const Tensor& totals) const {
      auto [by_weight, by_count] = count_targets(target, weight, o);
      totals.scalar_type() == at::kDouble ? write_scalars<double>(totals, {by_weight, by_count})
                                          : write_scalars<float>(totals, {by_weight, by_count});
    }
    void forward(const Tensor& logits, int64_t first, const RowsOut& out) const {
      forward_rows_cpu(op, logits, part(first, logits), weight, o, out);
    }
    void backward(
        Tensor& logits, int64_t first, const char* stats, const Tensor& totals, const Upstream& upstream) const {
      backward_rows_cpu(op, logits, logits, part(first, logits), weight, stats, totals, upstream, o);
    }
    void forward_backward(
        Tensor& logits, int64_t first, RowsOut out, const Tensor& totals, const Upstream& upstream) const {
      Tensor stats = at::empty({3, logits.size(0)}, logits.options().dtype(compute_type(logits)));
      out.stats = static_cast<char*>(stats.mutable_data_ptr());
      forward(logits, first, out);
      backward(logits, first, out.stats, totals, upstream);
    }
    void describe(const Tensor& logits, int64_t first, const char* stats, char* log_prob, char* entropy) const {
      describe_rows_cpu(op, logits, part(first, logits), stats, o, log_prob, entropy);
    }
    void sum(const RowBuffers& rows, const Results& out, const Tensor&) const {
      sum_rows_cpu(rows, count_targets(target, weight, o), o, out);
    }

    /// Moves the gradients of true logits out of dlogits.
    void take_targets(Tensor& dlogits, int64_t first, Tensor& taken) const {
      const int64_t* y = target.const_data_ptr<int64_t>() + first;
      float* to = taken.data_ptr<float>() + first;
      AT_DISPATCH_REDUCED_FLOATING_TYPES(dlogits.scalar_type(), "take_targets", [&] {
        auto* rows = dlogits.data_ptr<scalar_t>();
        for (int64_t row = 0; row < dlogits.size(0); ++row) {
          to[row] = 0;
          if (y[row] == o.ignore_index) continue;
          auto& at = rows[row * dlogits.stride(0) + y[row]];
          to[row] = float(at);
          at = scalar_t(0);
        }
      });
    }
    /// And adds what they contribute to d weight.
    void add_targets(Tensor& dweight, const Tensor& x_in, const Tensor& taken, double scale) const {
      auto [classes, order] = sort_targets(target, n, o);
      const int32_t *y = classes.template const_data_ptr<int32_t>(), *row_of = order.template const_data_ptr<int32_t>();
      const float* factor = taken.const_data_ptr<float>();
      const int64_t rows = target.numel(), columns = dweight.size(1);
      Tensor x = x_in.contiguous();
      AT_DISPATCH_REDUCED_FLOATING_TYPES(dweight.scalar_type(), "add_targets", [&] {
        const auto* from = x.const_data_ptr<scalar_t>();
        auto* to = dweight.data_ptr<scalar_t>();
        at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
          std::vector<float> sum(columns);
          for (int64_t start = begin; start < end; ++start) {
            // Whoever meets a class first adds all of its rows.
            if (y[start] < 0 || (start > 0 && y[start - 1] == y[start])) continue;
            std::fill(sum.begin(), sum.end(), 0.f);
            for (int64_t i = start; i < rows && y[i] == y[start]; ++i) {
              const auto* row = from + row_of[i] * columns;
              const float f = factor[row_of[i]];
              for (int64_t c = 0; c < columns; ++c) sum[c] += f * float(row[c]);
            }
            auto* out = to + y[start] * dweight.stride(0);
            for (int64_t c = 0; c < columns; ++c) {
              auto& at = out[c * dweight.stride(1)];
              at = scalar_t(float(at) + float(scale) * sum[c]);
            }
          }
        });
      });
    }
  };
};

struct Cuda {
  // Tokens up to which comparing all pairs should take no longer than a sort. On an H200, 8192 took 18 us, and twice as
  // many are four times the pairs; a sort of 8192 as int64 took 125 us, and as int32 has half of its passes to make.
  static constexpr int64_t kMostCompared = 16384;

  struct Rows {
    CudaCall call;
    Options o;

    Rows(const char* op, int64_t classes, const Tensor& target, const Tensor& ce_weight, const Options& options)
        : call(op, classes, target, ce_weight, options), o(options) {}

    void count(const Tensor& totals) const {
      Results out;
      out.totals = totals;
      sum_rows_cuda(call, o, {}, out);
    }
    void forward(const Tensor& logits, int64_t first, const RowsOut& out) const {
      forward_rows_cuda(call, o, logits, first, out);
    }
    void backward(
        Tensor& logits, int64_t first, const char* stats, const Tensor& totals, const Upstream& upstream) const {
      // This kernel has no word for "no gradient arrives": a single 1 with stride 0.
      Upstream one = upstream;
      if (!one.values.defined()) {
        one.values = at::ones({}, call.target.options().dtype(at::kFloat));
        one.stride = 0;
      }
      backward_rows_cuda(call, o, logits, logits, first, stats, totals, one);
    }
    void forward_backward(
        Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals, const Upstream& upstream) const {
      forward_backward_rows_cuda(call, o, logits, first, out, totals, upstream);
    }
    void describe(const Tensor& logits, int64_t first, const char* stats, char* log_prob, char* entropy) const {
      describe_rows_cuda(call, o, logits, first, stats, log_prob, entropy);
    }
    void sum(const RowBuffers& rows, const Results& out, const Tensor& totals) const {
      sum_rows_cuda(call, o, rows.out, out, totals);
    }

    void take_targets(Tensor& dlogits, int64_t first, Tensor& taken) const {
      using K = kernels::fused_linear_cross_entropy_take_targets;
      const auto& config = runtime::first_fit<K>(call.n, false);
      const int64_t rows = dlogits.size(0);
      K::Args args{address(dlogits),  call.target_at(first), taken.const_data_ptr<float>() + first,
                   int32_t(rows),     int32_t(call.n),       dlogits.stride(0),
                   call.target_words, o.ignore_index};
      auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(dlogits))));
      launch<K>(call.op, call.device, variant, {uint32_t((rows + config.BLOCK - 1) / config.BLOCK)}, args);
    }
    std::tuple<Tensor, Tensor> order_targets() const {
      using K = kernels::fused_linear_cross_entropy_order_targets;
      const int64_t rows = call.target.numel();
      if (rows > kMostCompared) return sort_targets(call.target, call.n, o);
      const auto& config = runtime::first_fit<K>(call.n, false);
      auto numbers = call.target.options().dtype(at::kInt);
      Tensor classes = at::empty({rows}, numbers), order = at::empty({rows}, numbers);
      K::Args args{address(call.target), address(classes), address(order),
                   int32_t(rows),        int32_t(call.n),  o.ignore_index};
      auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(call.target_words - 1));
      launch<K>(call.op, call.device, variant, {uint32_t((rows + config.BLOCK - 1) / config.BLOCK)}, args);
      return {classes, order};
    }
    void add_targets(Tensor& dweight, const Tensor& x, const Tensor& taken, double scale) const {
      using K = kernels::fused_linear_cross_entropy_add_targets;
      auto [classes, order] = order_targets();
      const int64_t rows = call.target.numel(), columns = dweight.size(1);
      bool aligned = dweight.stride(1) == 1 && ((columns | dweight.stride(0) | x.stride(0)) & 7) == 0 &&
          aligned16(address(dweight), address(x));
      const auto& config = runtime::first_fit<K>(columns, aligned);
      K::Args args{address(dweight),  address(x),    address(taken),   address(classes),
                   address(order),    int32_t(rows), int32_t(columns), dweight.stride(0),
                   dweight.stride(1), x.stride(0),   float(scale)};
      auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(dweight))));
      const int64_t blocks = (columns + config.BLOCK_N - 1) / config.BLOCK_N;
      launch<K>(call.op, call.device, variant, {uint32_t(rows * blocks)}, args);
    }
  };
};

// ---- The loop

/// A call's way through the chunks.
template <class Rows>
struct Pass {
  // Multiplications of a call that takes some 13 ms on an H200.
  static constexpr double kSustained = double(int64_t(1) << 42);

  Rows rows;
  const Tensor x, weight, bias;  // x: (M, H)
  const double logits_scale;
  Plan plan;
  const bool sustained;
  Gradients into;
  double shrink = 1;  // of d weight and d bias
  Tensor bias_sum, taken;

  Pass(
      const char* op, const Tensor& x_in, const Tensor& weight_in, const Tensor& target, const Tensor& bias_in,
      const Tensor& ce_weight, const Settings& s, Wanted wanted, const Gradients& gradients)
      : rows(op, weight_in.size(0), target.reshape(-1), ce_weight, s.o),
        x(x_in),
        weight(weight_in),
        bias(bias_in),
        logits_scale(s.logits_scale),
        plan(make_plan(op, x_in.size(0), weight_in.size(0), x_in.scalar_type(), wanted, s.memory_budget)),
        sustained(3.0 * double(x_in.numel()) * double(weight_in.size(0)) >= kSustained),
        into(gradients) {
    auto floats = x.options().dtype(compute_type(x));
    if (into.input.defined()) into.input = into.input.view({x.size(0), x.size(1)});
    if (into.bias.defined()) bias_sum = at::zeros({weight.size(0)}, floats);
    if (into.weight.defined() && plan.chunks == 0) into.weight.zero_();
    if (into.weight.defined() && takes_targets(x.scalar_type(), plan.chunks, wanted)) {
      taken = at::empty({x.size(0)}, floats);
    }
  }

  Tensor buffer() const { return at::empty({std::min(plan.chunk, x.size(0)), plan.row}, x.options()); }

  /// Where the logits of the tokens from `first` on go, in the buffer's rows.
  Tensor rows_of(const Tensor& buffer, int64_t first) const {
    const int64_t rows = std::min(plan.chunk, x.size(0) - first), classes = weight.size(0);
    // Rows without gaps where a product would read these, which nobody writes: oneDNN does on CPUs with AMX (torch 2.13).
    // On CUDA, ATen adds a bias to rows with gaps after it has rounded them, where classes are a multiple of 8.
    const bool dense = x.is_cpu() || (bias.defined() && classes % 8 == 0);
    if (dense) return buffer.flatten().narrow(0, 0, rows * classes).view({rows, classes});
    return buffer.narrow(0, 0, rows).narrow(1, 0, classes);
  }

  Tensor logits(const Tensor& buffer, int64_t first) const {
    Tensor out = rows_of(buffer, first), part = x.narrow(0, first, out.size(0));
    if (bias.defined()) {
      at::addmm_out(out, bias, part, weight.t(), logits_scale, logits_scale);
    } else {
      multiply(out, part, weight.t(), 0, logits_scale, sustained);
    }
    return out;
  }

  /// From a chunk's d logits, which this spends.
  void add(Tensor& dlogits, int64_t first) {
    const int64_t count = dlogits.size(0);
    if (into.input.defined()) {
      multiply(into.input.narrow(0, first, count), dlogits, weight, 0, logits_scale, sustained);
    }
    if (bias_sum.defined()) bias_sum.add_(dlogits.sum(0, false, bias_sum.scalar_type()), logits_scale * shrink);
    if (!into.weight.defined()) return;
    if (taken.defined()) rows.take_targets(dlogits, first, taken);
    multiply(into.weight, dlogits.t(), x.narrow(0, first, count), first > 0, logits_scale * shrink, sustained);
  }

  /// A chunk without its logits. Until it is made, d input lends its rows to sums, then to the weighed tokens.
  void add_exponentials(
      const Exponentials& by, const Tensor& buffer, int64_t first, const RowsOut& out, const Tensor& totals,
      const Tensor& grad) {
    Tensor e = rows_of(buffer, first);
    if (!into.input.defined()) return by.make(e, {}, first, out, {}, {}, {}, false);
    Tensor dx = into.input.narrow(0, first, e.size(0));
    by.make(e, dx, first, out, totals, grad, taken, into.weight.defined());
    if (into.weight.defined()) multiply(into.weight, e.t(), dx, first > 0, logits_scale * shrink, sustained);
    multiply(dx, e, weight, 0, logits_scale, sustained);
    by.rescale(dx, first, taken);
  }

  void finish() {
    if (taken.defined()) rows.add_targets(into.weight, x, taken, logits_scale * shrink);
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
  }
};

/// Tokens in rows of unit stride, as matrix products and our kernels take them.
inline Tensor as_rows(const Tensor& input) {
  Tensor x = as_matrix(input);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

inline Tensor rows_of_token_weight(const Settings& s, const Tensor& input) {
  if (!s.token_weight || !s.token_weight->defined()) return Tensor();
  return s.token_weight->reshape(-1).to(compute_type(input)).contiguous();
}

/// Whether logits are for nothing but the loss and, if any, its gradients, of which that of input is one: it lends its rows
/// to what comes before it.
inline bool is_loss_alone(const Settings& s, const Tensor& bias, const Wanted& wanted) {
  const bool extras = bias.defined() || s.o.label_smoothing != 0 || s.o.softcap || wanted.metrics || wanted.log_probs;
  const bool made_now = wanted.any_gradient() ? s.o.reduced() && wanted.input : true;
  return made_now && !extras && s.logits_scale > 0;
}

template <class Device>
Forward forward(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias,
    const Tensor& ce_weight, const Settings& s, Wanted wanted) {
  c10::DeviceGuard guard(input.device());
  const Options& o = s.o;
  Forward out = empty_forward(input, weight, target, bias, s, wanted);
  Tensor token_weight = rows_of_token_weight(s, input);
  Pass<typename Device::Rows> pass(op, as_rows(input), weight, target, bias, ce_weight, s, wanted, out.gradients);
  const int64_t tokens = pass.x.size(0);
  const bool now = wanted.any_gradient() && o.reduced();
  const size_t element = out.rows.loss.element_size();
  RowBuffers rows(out.rows, tokens, o, {wanted.metrics, false});
  Tensor totals = out.rows.totals;
  if (o.mean() && (now || totals.defined())) {
    if (!totals.defined()) totals = at::empty({2}, out.rows.loss.options());
    pass.rows.count(totals);
  }
  const Tensor counted = totals;
  if (out.late.defined()) {
    int64_t halvings = 0;
    while ((int64_t(1) << (2 * halvings)) < tokens) ++halvings;
    pass.shrink = std::ldexp(1.0, -int(halvings));
    Tensor grow = at::empty_like(out.late);
    grow.select(0, 0).fill_(1);
    grow.select(0, 1).fill_(std::ldexp(1.0, int(halvings)));
    if (o.mean()) {
      // Without any target gradients are 0, not 0 / 0.
      Tensor by = totals.select(0, 0), inverse = at::where(by == 0, at::zeros_like(by), by.reciprocal());
      out.late.copy_(grow * inverse);
      // Relative to each other: the first has become 1.
      totals = totals * inverse;
    } else {
      out.late.copy_(grow);
    }
  }
  Tensor buffer = pass.buffer(), scratch_stats;
  std::optional<Exponentials> exponentials;
  // The plan has room for sums where there are no gradients.
  const bool has_room = !s.memory_budget || !now;
  if (is_loss_alone(s, bias, wanted) && Exponentials::serve(pass.x, weight, pass.plan.chunk, has_room)) {
    exponentials.emplace(op, pass.x, weight, target.reshape(-1), ce_weight, o, s.logits_scale, buffer.size(0), now);
  }
  const bool describe = wanted.log_probs;
  if (describe && !rows.out.stats) {
    scratch_stats = at::empty({3, buffer.size(0)}, out.rows.loss.options());
  }
  auto at_token = [&](const Tensor& t, int64_t first) {
    return static_cast<char*>(t.mutable_data_ptr()) + first * int64_t(element);
  };
  for (int64_t first = 0; first < tokens; first += pass.plan.chunk) {
    RowsOut part = rows.out.from(first, element);
    Tensor weights;
    if (token_weight.defined()) weights = token_weight.narrow(0, first, std::min(pass.plan.chunk, tokens - first));
    if (exponentials) {
      pass.add_exponentials(*exponentials, buffer, first, part, totals, weights);
      continue;
    }
    Tensor logits = pass.logits(buffer, first);
    if (scratch_stats.defined()) part.stats = static_cast<char*>(scratch_stats.mutable_data_ptr());
    Upstream upstream(weights);
    if (now && !describe) {
      pass.rows.forward_backward(logits, first, part, totals, upstream);
    } else {
      pass.rows.forward(logits, first, part);
      if (describe) {
        pass.rows.describe(logits, first, part.stats, at_token(out.log_probs, first), at_token(out.entropy, first));
      }
      if (now) pass.rows.backward(logits, first, part.stats, totals, upstream);
    }
    if (now) pass.add(logits, first);
  }
  if (now) pass.finish();
  if (token_weight.defined()) {
    if (rows.scratch.defined()) {
      rows.scratch.narrow(0, 0, rows.out.z_loss ? 2 : 1).mul_(token_weight);
    } else {
      Tensor each = token_weight.view_as(out.rows.loss);
      out.rows.loss.mul_(each);
      if (out.rows.z_loss.defined()) out.rows.z_loss.mul_(each);
    }
  }
  if (o.reduced()) pass.rows.sum(rows, out.rows, counted);
  return out;
}

/// For reduction="none": the chunks' logits again, and what arrives for each row.
template <class Device>
Gradients backward(
    const char* op, const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target,
    const Tensor& bias, const Tensor& ce_weight, const Tensor& stats, const Tensor& totals, const Settings& s,
    Wanted wanted) {
  c10::DeviceGuard guard(input.device());
  LIGER_CHECK(
      grad.sizes().equals(target.sizes()), op, "the gradient", c10::str("have shape ", target.sizes()), grad.sizes());
  Gradients out = empty_gradients(input, weight, bias, wanted);
  Pass<typename Device::Rows> pass(op, as_rows(input), weight, target, bias, ce_weight, s, wanted, out);
  Tensor arrives = grad.reshape(-1).to(compute_type(input)).contiguous();
  Tensor token_weight = rows_of_token_weight(s, input);
  if (token_weight.defined()) arrives = arrives * token_weight;
  const auto* at = static_cast<const char*>(stats.const_data_ptr());
  Tensor buffer = pass.buffer();
  for (int64_t first = 0; first < pass.x.size(0); first += pass.plan.chunk) {
    Tensor logits = pass.logits(buffer, first);
    const char* stats_of = at + 3 * first * int64_t(stats.element_size());
    pass.rows.backward(logits, first, stats_of, totals, Upstream(arrives.narrow(0, first, logits.size(0))));
    pass.add(logits, first);
  }
  pass.finish();
  return out;
}

}  // namespace liger::core::linear_cross_entropy
