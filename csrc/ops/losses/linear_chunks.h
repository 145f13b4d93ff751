#pragma once

// What losses of a linear head share: the split of a call's tokens into chunks, their order, the memory of a chunk's
// logits, and gradients.

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "core/aten.h"
#include "core/autograd.h"
#include "core/rows/rows.h"
#include "gemm/adapters/low_rank.h"
#include "gemm/multiply.h"
#include "core/split.h"

namespace liger::ops {

constexpr int64_t kMiB = 1 << 20;

struct Plan {
  int64_t chunk = 1, chunks = 0;  // chunk: tokens per chunk
  int64_t buffers = 1;  // of logits; with two, a chunk's collective runs during another chunk's GEMMs
  int64_t row = 0;  // row stride of logits in elements: whole cache lines, for fast GEMMs
  int64_t bytes = 0;  // of everything that is freed when the call returns
};

/// Row stride of the logits of `classes`.
inline int64_t logits_stride(int64_t classes, at::ScalarType dtype) {
  const int64_t line = 128 / int64_t(c10::elementSize(dtype));
  return (classes + line - 1) / line * line;
}

/// Sets chunk and chunks. per_row: bytes for each token of a chunk, per_token: for each token of the call. usual: the
/// budget if the caller gives none. Returns the budget.
inline int64_t divide_tokens(
    Plan& plan, const char* op, int64_t tokens, int64_t per_row, int64_t per_token, int64_t usual,
    std::optional<int64_t> memory_budget) {
  constexpr int64_t kTile = 256;
  usual += tokens * per_token;
  const int64_t budget = memory_budget.value_or(std::max(usual, per_row * kTile / 2 + tokens * per_token));
  const int64_t least = tokens * per_token + per_row;
  LIGER_CHECK(
      budget >= least || tokens == 0, op, "memory_budget",
      c10::str("be at least ", least, " bytes for the logits of one of ", tokens, " tokens"), budget);
  int64_t most = std::min<int64_t>((budget - tokens * per_token) / per_row, 8192);
  // cuBLAS splits GEMMs of this size into pairs of tiles, 256 tokens, so other chunk sizes are slower.
  const int64_t tile = most < 2 * kTile ? kTile / 4 : kTile;
  if (most > tile) most = most / tile * tile;
  if (tokens == 0) return budget;
  plan.chunks = (tokens + most - 1) / most;
  // Chunks have one size, because a small remainder would be slow.
  plan.chunk = (tokens + plan.chunks - 1) / plan.chunks;
  if (plan.chunks > 1) plan.chunk = std::min(most, (plan.chunk + tile - 1) / tile * tile);
  plan.chunks = (tokens + plan.chunk - 1) / plan.chunk;
  return budget;
}

// Each chunk of tokens adds to d weight in its dtype, which rounds it. r: the error of one rounding to 16 bits. If
// tokens are independent, n chunks make an error of r sqrt((n + 1) / 2), beside r for the 16-bit gradients of logits;
// eager code makes r for each. If partial sums grow evenly, n chunks make r sqrt((n + 1) (2 n + 1) / (6 n)), and eager
// code r. Up to this number, neither is more than 1.5 times eager's error.
constexpr int64_t kMostRoundings = 5;

/// All tokens and some classes at a time: a GEMM then has a class's whole gradient. Tokens are divided only if the sums
/// of d input over classes do not fit.
struct BlockPlan : Plan {
  int64_t classes = 1;  // per GEMM
};

/// per_logit: bytes for each token and class. sums: bytes for each token.
inline BlockPlan divide_classes(
    const char* op, int64_t tokens, int64_t classes, int64_t per_logit, int64_t sums, int64_t budget) {
  // Fewer classes make the sums over classes slow: each GEMM reads and writes them.
  constexpr int64_t kFewClasses = 4096, kTile = 256, kRows = 64;
  BlockPlan plan;
  const int64_t least = sums + per_logit * std::min<int64_t>(classes, kRows) + 16;
  LIGER_CHECK(
      budget >= least || tokens == 0, op, "memory_budget", c10::str("be at least ", least, " bytes for one token"),
      budget);
  plan.classes = std::max<int64_t>(1, classes);
  if (tokens == 0 || classes == 0) {
    plan.chunk = std::max<int64_t>(1, tokens), plan.chunks = tokens > 0, plan.bytes = 0;
    return plan;
  }
  auto fitting = [&](int64_t columns) { return (budget - sums) / (sums + per_logit * std::min(classes, columns)); };
  int64_t most = fitting(kFewClasses);
  if (sums > 0) most = std::min(most, budget * 2 / 5 / sums);
  // As many divisions as d weight may be rounded, if at least a tile of classes fits.
  const int64_t even = (tokens + kMostRoundings - 1) / kMostRoundings;
  most = std::max(most, std::min((even + kRows - 1) / kRows * kRows, fitting(kTile)));
  most = std::clamp<int64_t>(most, 1, tokens);
  if (most > kRows && most < tokens) most = most / kRows * kRows;
  plan.chunks = (tokens + most - 1) / most;
  plan.chunk = (tokens + plan.chunks - 1) / plan.chunks;
  if (plan.chunks > 1 && most > kRows) plan.chunk = std::min(most, (plan.chunk + kRows - 1) / kRows * kRows);
  plan.chunks = (tokens + plan.chunk - 1) / plan.chunk;
  int64_t fit = std::max<int64_t>(1, (budget / plan.chunk - sums) / per_logit);
  if (fit < classes) {
    if (fit > kTile) fit = fit / kTile * kTile;
    const int64_t blocks = (classes + fit - 1) / fit, each = (classes + blocks - 1) / blocks;
    plan.classes = std::min(fit, fit > kTile ? (each + kTile - 1) / kTile * kTile : each);
  }
  plan.bytes = plan.chunk * (sums + plan.classes * per_logit);
  return plan;
}

/// Tokens as rows of unit stride, which GEMMs and our kernels require.
inline at::Tensor as_rows(const at::Tensor& input) {
  at::Tensor x = core::as_matrix(input);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

/// The part of a buffer for the logits of `rows` tokens and `classes`.
inline at::Tensor logits_in(const at::Tensor& buffer, int64_t rows, int64_t classes, bool has_bias) {
  // On a CPU, rows must have no gaps: on CPUs with AMX, oneDNN's GEMM (torch 2.13) reads the uninitialised gaps.
  // On CUDA with a bias, rows have no gaps if classes are a multiple of 8. With gaps, ATen would add the bias after
  // rounding.
  const bool dense = !core::runs_kernels(buffer) || (has_bias && classes % 8 == 0);
  if (dense) return buffer.flatten().narrow(0, 0, rows * classes).view({rows, classes});
  return buffer.narrow(0, 0, rows).narrow(1, 0, classes);
}

/// The order in which a call takes its tokens: the caller's, unless input is split along the sequence. Then a chunk has
/// the same number of tokens of every rank, rank by rank.
struct TokenOrder {
  int64_t ranks = 1, dim = 0, tokens = 0, step = 0;  // tokens: of one rank; step: of them in a chunk

  bool is_split() const { return ranks > 1; }

  /// `each` numbers per token, from the caller's order: (M,), or (M, each) if there are several.
  at::Tensor arrange(const at::Tensor& t, int64_t each = 1) const {
    if (!is_split() || tokens == 0) return each == 1 ? t.reshape(-1) : t.reshape({-1, each});
    at::Tensor by_rank = ranks_first(t).reshape({ranks, tokens, each});
    std::vector<at::Tensor> chunks;
    for (int64_t first = 0; first < tokens; first += step) {
      chunks.push_back(by_rank.narrow(1, first, std::min(step, tokens - first)).reshape({-1, each}));
    }
    at::Tensor out = chunks.size() == 1 ? chunks[0] : at::cat(chunks);
    return each == 1 ? out.view(-1) : out;
  }

  /// The reverse, into the caller's shape.
  at::Tensor restore(const at::Tensor& t, at::IntArrayRef shape, int64_t each = 1) const {
    if (!is_split() || tokens == 0) return t.view(shape);
    std::vector<at::Tensor> chunks;
    for (int64_t first = 0; first < tokens; first += step) {
      const int64_t count = std::min(step, tokens - first);
      chunks.push_back(t.narrow(0, ranks * first, ranks * count).view({ranks, count, each}));
    }
    at::Tensor out = at::empty(shape, t.options()), to = ranks_first(out);
    to.copy_((chunks.size() == 1 ? chunks[0] : at::cat(chunks, 1)).view(to.sizes()));
    return out;
  }

 private:
  at::Tensor ranks_first(const at::Tensor& t) const {
    return t.unflatten(dim, at::IntArrayRef({ranks, t.size(dim) / ranks})).movedim(dim, 0);
  }
};

/// `dim` of an input that is split along a sequence, counted from the first. name: of the input.
inline std::optional<int64_t> check_sequence_dim(
    const char* op, const char* name, const at::Tensor& input, std::optional<int64_t> dim,
    const core::Vocabulary& vocabulary) {
  if (!dim) return dim;
  LIGER_CHECK(vocabulary.is_split(), op, "sequence_dim", "be None without a group", *dim);
  const int64_t dims = input.dim();
  LIGER_CHECK(
      *dim >= -dims && *dim < dims && at::maybe_wrap_dim(*dim, dims) < dims - 1, op, "sequence_dim",
      c10::str("be a dimension of ", name, " other than the last"), *dim);
  return at::maybe_wrap_dim(*dim, dims);
}

/// Of a call with `tokens` in all. positions: of all ranks, in their dimensions. Fits the plan's chunks to whole
/// numbers of tokens of every rank.
inline TokenOrder order_of(
    const char* op, const at::Tensor& input, at::IntArrayRef positions, int64_t tokens, const core::Shard& shard,
    std::optional<int64_t> sequence_dim, Plan& plan) {
  if (!sequence_dim || !shard.is_split()) return {};
  TokenOrder order{shard.ranks(), at::maybe_wrap_dim(*sequence_dim, input.dim()), tokens / shard.ranks(), 0};
  const int64_t have = input.size(order.dim), all = positions[order.dim];
  LIGER_CHECK(
      have * order.ranks == all, op, "input",
      c10::str("have ", all, " / ", order.ranks, " positions along sequence_dim, the same on every rank"), have);
  order.step = std::max<int64_t>(1, plan.chunk / order.ranks);
  plan.chunk = order.step * order.ranks;
  plan.chunks = order.tokens ? (order.tokens + order.step - 1) / order.step : 0;
  return order;
}

/// The tokens of an input, in the order of the call.
struct Tokens {
  at::Tensor local, x;  // (tokens of this rank, H), (M, H)

  Tokens(const at::Tensor& input, int64_t tokens, const TokenOrder& order)
      : local(as_rows(input)), x(order.is_split() ? at::empty({tokens, local.size(1)}, local.options()) : local) {}

  /// Gathers the chunk of tokens from `first` on, if there is one and the input is split.
  core::Pending fetch(int64_t first, int64_t chunk, const TokenOrder& order, const core::Shard& shard) const {
    if (!order.is_split() || first >= x.size(0)) return {};
    const int64_t count = std::min(chunk, x.size(0) - first);
    const at::Tensor part = local.narrow(0, first / order.ranks, count / order.ranks).contiguous();
    return shard.group->all_gather(x.narrow(0, first, count), part);
  }
};

// ---- Gradients

/// The gradient of an input, chunk by chunk. Over split classes it is a sum over ranks, which runs while the caller
/// goes on.
struct InputGradient {
  at::Tensor all;  // (tokens of this rank, H); undefined: not wanted
  core::Pending reducing;

  bool defined() const { return all.defined(); }

  /// Memory for the gradient of `count` tokens from `first` on. It is complete after reduce() and wait().
  at::Tensor of_chunk(int64_t first, int64_t count, const TokenOrder& order) const {
    return order.is_split() ? at::empty({count, all.size(1)}, all.options()) : all.narrow(0, first, count);
  }

  /// Starts the sum over ranks of what of_chunk() returned.
  void reduce(const at::Tensor& dx, int64_t first, const TokenOrder& order, const core::Shard& shard) {
    if (!shard.is_split()) return;
    reducing.wait();
    if (!order.is_split()) {
      reducing = shard.group->all_reduce(dx);
    } else {
      const int64_t count = dx.size(0) / order.ranks;
      reducing = shard.group->reduce_scatter(all.narrow(0, first / order.ranks, count), dx);
    }
  }

  void wait() { reducing.wait(); }
};

/// 1 / total, and 0 for 0: without anything to divide by, gradients are 0 and not 0 / 0.
inline at::Tensor inverse_or_zero(const at::Tensor& total) {
  return at::where(total == 0, at::zeros_like(total), total.reciprocal());
}

/// fp16 cannot represent small gradients, so forward scales those of weight and bias down by a power of two. Fills the
/// factors that backward applies, (of input's gradient, of weight's and bias's), and returns that power. inverse:
/// another factor for both, if defined.
inline double defer_scale(at::Tensor& factors, int64_t tokens, const at::Tensor& inverse) {
  int64_t halvings = 0;
  while ((int64_t(1) << (2 * halvings)) < tokens) ++halvings;
  factors.select(0, 0).fill_(1);
  factors.select(0, 1).fill_(std::ldexp(1.0, int(halvings)));
  if (inverse.defined()) factors.mul_(inverse);
  return std::ldexp(1.0, -int(halvings));
}

/// Gradients that a call computes.
struct WantedGradients {
  bool input = false, weight = false, bias = false, low_rank_input = false, low_rank_weight = false;

  /// Any but that of input.
  constexpr bool head() const { return weight || bias || low_rank_input || low_rank_weight; }
  constexpr bool any() const { return input || head(); }

  constexpr int64_t bits() const { return core::wanted_bits(input, weight, bias, low_rank_input, low_rank_weight); }
  static constexpr WantedGradients from_bits(int64_t bits) {
    auto has = [&](int gradient) { return core::wants(bits, gradient); };
    return {has(0), has(1), has(2), has(3), has(4)};
  }
};

/// The tensors of a linear head that can require gradients, or these gradients. Those that are not given, or not
/// wanted, are undefined.
struct Gradients {
  at::Tensor input, weight, bias, low_rank_input, low_rank_weight;

  auto tie() { return std::tie(input, weight, bias, low_rank_input, low_rank_weight); }

  /// Those for which f is true.
  template <class F>
  WantedGradients where(const F& f) const {
    return {f(input), f(weight), f(bias), f(low_rank_input), f(low_rank_weight)};
  }
  WantedGradients defined() const {
    return where([](const at::Tensor& t) { return t.defined(); });
  }
};

/// Memory for the gradients of these tensors.
inline Gradients empty_gradients(const Gradients& of, WantedGradients wanted) {
  auto like = [](bool wanted, const at::Tensor& t, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
    return wanted ? at::empty_like(t, t.options().memory_format(format)) : at::Tensor();
  };
  return {
      like(wanted.input, of.input), like(wanted.weight, of.weight, at::MemoryFormat::Preserve),
      like(wanted.bias, of.bias), like(wanted.low_rank_input, of.low_rank_input),
      like(wanted.low_rank_weight, of.low_rank_weight)};
}

/// The tensors that a tie() lists, as private operators return them.
template <class... T>
std::tuple<T...> copies(const std::tuple<T&...>& tensors) {
  return tensors;
}
using FiveGradients = decltype(copies(Gradients().tie()));

/// The same as backward nodes return them.
inline core::variable_list listed(FiveGradients&& gradients) {
  return std::apply([](auto&... each) { return core::variable_list{std::move(each)...}; }, gradients);
}

/// The bits of WantedGradients for those of the arguments at these positions that require a gradient.
template <size_t... Edge, class... A>
int64_t required(std::index_sequence<Edge...>, const A&... a) {
  auto requires_grad = [](const std::optional<at::Tensor>& t) { return t && t->requires_grad(); };
  return core::wanted_bits(requires_grad(std::get<Edge>(std::tie(a...)))...);
}

// ---- Checks

/// weight: (V, H), in a call with input (..., H). other: a tensor that the caller may have swapped with one of them.
inline void check_weight_shape(
    const char* op, const char* input_name, const at::Tensor& input, const char* weight_name, const at::Tensor& weight,
    const at::Tensor& other) {
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, weight_name,
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of ", input_name),
      weight.sym_sizes(), core::hint_if_swapped(input_name, input, weight_name, weight, other));
}

inline void check_per_class(const char* op, const char* name, const at::Tensor& t, const c10::SymInt& classes) {
  LIGER_CHECK(
      t.dim() == 1 && t.sym_size(0) == classes, op, name, c10::str("have shape [", classes, "], one value per class"),
      t.sym_sizes());
}

/// A low-rank addend t b^T of a head's logits: both t and b are given, or none of them. prefix: of the arguments'
/// names.
inline void check_low_rank(
    const char* op, const std::string& prefix, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& low_rank_input, const at::Tensor& low_rank_weight, std::optional<int64_t> sequence_dim) {
  const std::string t_name = prefix + "low_rank_input", b_name = prefix + "low_rank_weight";
  LIGER_CHECK(
      low_rank_input.defined() == low_rank_weight.defined(), op, b_name, "be given if and only if " + t_name + " is",
      low_rank_weight.defined() ? "a tensor" : "None");
  if (!low_rank_input.defined()) return;
  const std::string like = prefix + "input";
  auto check = [&](const std::string& name, const at::Tensor& t) {
    core::check_dense(op, name.c_str(), t);
    core::check_same_device(op, name.c_str(), t, like.c_str(), input);
    core::check_parameter_dtype(op, name.c_str(), t, like.c_str(), input);
  };
  check(t_name, low_rank_input);
  check(b_name, low_rank_weight);
  auto rows = [](const at::Tensor& t) { return t.sym_sizes().slice(0, t.dim() - 1); };
  LIGER_CHECK(
      low_rank_input.dim() == input.dim() && rows(low_rank_input).equals(rows(input)), op, t_name,
      c10::str("have the shape of ", prefix, "input, ", input.sym_sizes(), ", except for the last dimension"),
      low_rank_input.sym_sizes());
  const auto classes = weight.sym_size(0), ranks = low_rank_input.sym_sizes().back();
  LIGER_CHECK(
      low_rank_weight.dim() == 2 && low_rank_weight.sym_size(0) == classes && low_rank_weight.sym_size(1) == ranks, op,
      b_name, c10::str("have shape [", classes, ", ", ranks, "], the classes and the last dimension of ", t_name),
      low_rank_weight.sym_sizes());
  LIGER_CHECK(!sequence_dim, op, t_name, "be None with sequence_dim", "both");
}

/// Completes a low-rank addend's gradients. That of t is a sum over the ranks that have the classes.
inline void finish_low_rank(gemm::LowRank& low_rank, const core::Shard& shard) {
  if (!low_rank.defined()) return;
  if (shard.is_split() && low_rank.gradient_of_t().defined()) {
    shard.group->all_reduce(low_rank.gradient_of_t()).wait();
  }
  low_rank.finish();
}

/// Calls f(first class, number of classes, their rows of weight in `wide`), so that no wide copy of the weight exists.
template <class F>
void for_widened_parts(const at::Tensor& weight, at::ScalarType wide, const F& f) {
  constexpr int64_t kBytes = 32 << 20;
  const int64_t n = weight.size(0), row = weight.size(1) * int64_t(c10::elementSize(wide));
  const int64_t step = std::max<int64_t>(1, kBytes / std::max<int64_t>(1, row));
  for (int64_t first = 0; first < n; first += step) {
    const int64_t count = std::min(step, n - first);
    f(first, count, weight.narrow(0, first, count).to(wide));
  }
}

/// into = scale * dlogits @ weight, added to `into` if `add`. into: (T, H), of at least the dtype of dlogits (T, n).
inline void multiply_by_weight(
    at::Tensor into, const at::Tensor& dlogits, const at::Tensor& weight, bool add, double scale, bool sustained) {
  const at::ScalarType wide = into.scalar_type();
  const bool mixed = weight.scalar_type() != dlogits.scalar_type();
  if (dlogits.size(1) == 0) {
    if (!add) into.zero_();
  } else if (!mixed && wide == dlogits.scalar_type()) {
    gemm::multiply(into, dlogits, weight, add, scale, sustained);
  } else if (!mixed && into.is_cuda()) {
    at::addmm_out(into, into, dlogits, weight, wide, double(add), scale);
  } else {
    for_widened_parts(weight, wide, [&](int64_t first, int64_t count, const at::Tensor& w) {
      at::addmm_out(into, into, dlogits.narrow(1, first, count).to(wide), w, double(add || first > 0), scale);
    });
  }
}

}  // namespace liger::ops
