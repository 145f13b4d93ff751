#pragma once

// The products of lora_linear and their gradients.
//
//   y  = x W^T + scale t B^T         dA = u^T x
//   dx = dy W + u A                  dB = scale dy^T t
//
// All A of a group are multiplied with x in one pass, and sums accumulate in GEMMs. Four forms:
//
//   kernels   on CUDA, x in 16 bits, adapters of its dtype or, beside bf16, in fp32, of few ranks or with dropout:
//             gemm/adapters/lora_products.h. t is in fp32, with the ranks of each adapter padded.
//   plain     the adapters have x's dtype.
//   pieces    x in bf16, adapters in fp32, on CUDA: A, B, t and u are split into three bf16 pieces, see
//             liger_ops/kernels/linear/lora_linear.py.
//   wide      otherwise: x and dy are converted.
//
// In the last three t is in the adapters' dtype. Dropout drops elements of x in the adapters' products only, and
// multiplies the others by 1 / (1 - rate). t and u contain that factor.

#include <algorithm>
#include <utility>
#include <vector>

#include "core/autograd.h"
#include "core/cuda/launch.h"
#include "core/rows/rows.h"
#include "gemm/adapters/lora_dropout.h"
#include "gemm/adapters/lora_products.h"
#include "gemm/multiply.h"
#include "runtime/status.h"

namespace liger::ops::lora_linear {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;
using OptionalTensors = c10::List<std::optional<Tensor>>;
using Scales = at::ArrayRef<double>;

constexpr const char* kOp = "lora_linear";
constexpr const char* kBackward = "lora_linear backward";

/// Gradients, as core::wants() numbers them: of x, weights, biases, and all A and B.
enum : int { kX, kWeights, kBiases, kA, kB };

struct Cpu {};
struct Cuda {};
struct Meta {};

/// of[j]: the projection to which adapter j belongs. dropout: a rate for each adapter, or empty. Where a weight is
/// undefined, another layer multiplies it with x, and only the adapters are computed here.
struct Group {
  TensorList weights, a, b;
  Scales scale;
  at::IntArrayRef of;
  Tensor seeds;
  Scales dropout;

  double rate(size_t j) const { return dropout.empty() ? 0 : dropout[j]; }
  double gain(size_t j) const { return gemm::gain_of(rate(j)); }
};

inline c10::SymInt features_of(const Group& g, const OptionalTensors& biases, int64_t i) {
  if (g.weights[i].defined()) return g.weights[i].sym_size(0);
  const std::optional<Tensor> result = biases.get(i);
  if (result && result->defined()) return result->sym_sizes().back();
  const auto* first = std::find(g.of.begin(), g.of.end(), i);
  LIGER_CHECK(
      first != g.of.end(), kOp, "bias", "be another layer's result if there are no weight and no adapters", "None");
  return g.b[first - g.of.begin()].sym_size(0);
}

// ---- Forms

inline bool has_dtype(const Group& g, at::ScalarType dtype) {
  auto fits = [&](const Tensor& t) { return t.scalar_type() == dtype; };
  return std::all_of(g.a.begin(), g.a.end(), fits) && std::all_of(g.b.begin(), g.b.end(), fits);
}

inline bool drops(const Group& g) {
  return std::any_of(g.dropout.begin(), g.dropout.end(), [](double rate) { return rate > 0; });
}

// With more ranks per adapter, cuBLAS is faster.
constexpr int64_t kMostRanks = 32;

/// Whether the kernels compute products of x and these adapters.
inline bool has_kernels(const Tensor& x, const Group& g) {
  const auto dtype = x.scalar_type();
  return core::runs_kernels(x) && (dtype == at::kBFloat16 || (dtype == at::kHalf && has_dtype(g, at::kHalf)));
}

inline bool takes_kernels(const Tensor& x, const Group& g) {
  if (g.a.empty() || !has_kernels(x, g)) return false;
  auto has_few = [](const Tensor& a) { return a.sym_size(0) <= kMostRanks; };
  return drops(g) || std::all_of(g.a.begin(), g.a.end(), has_few);
}

inline bool takes_pieces(const Tensor& x, const Group& g) {
  return core::runs_kernels(x) && x.scalar_type() == at::kBFloat16 && !g.a.empty() && !has_dtype(g, at::kBFloat16);
}

/// The dtype in which the adapters' products are computed. Kernels convert to it as they load.
inline at::ScalarType adapter_dtype(const Tensor& x, const Group& g) {
  return has_dtype(g, x.scalar_type()) ? x.scalar_type() : core::compute_type(x);
}

/// The largest rank, padded.
inline c10::SymInt padded_rank(const Group& g, int64_t step = kernels::constants::lora_products::RANK_STEP) {
  c10::SymInt rank = 0;
  for (const Tensor& a : g.a) rank = rank.max(a.sym_size(0));
  return (rank + (step - 1)) / step * step;
}

/// The columns of t.
inline c10::SymInt all_ranks(const Tensor& x, const Group& g) {
  if (takes_kernels(x, g)) return padded_rank(g) * int64_t(g.a.size());
  c10::SymInt ranks = 0;
  for (const Tensor& a : g.a) ranks = ranks + a.sym_size(0);
  return ranks;
}

inline Tensors converted(TensorList list, at::ScalarType dtype) {
  Tensors out;
  for (const Tensor& t : list) out.push_back(t.to(dtype));
  return out;
}

/// The columns of each adapter.
inline Tensors columns_of(const Tensor& t, const Group& g) {
  Tensors out;
  int64_t first = 0;
  for (const Tensor& a : g.a) {
    out.push_back(t.narrow(1, first, a.size(0)));
    first += a.size(0);
  }
  return out;
}

/// scale * left * right, or left if `right` is undefined.
struct Product {
  Tensor left, right;
  double scale = 1;
};
using Products = std::vector<Product>;

/// out += all products, or out = their sum. Each is rounded to out's dtype as it is added.
inline void add(Tensor& out, const Products& products, bool accumulates) {
  for (const auto& [left, right, scale] : products) {
    if (right.defined()) {
      gemm::multiply(out, left, right, accumulates ? 1 : 0, scale, /*sustained=*/true);
    } else if (accumulates) {
      out.add_(left);
    } else {
      out.copy_(left);
    }
    accumulates = true;
  }
}

/// The sum of large and small products, which may have a wider dtype, and a bias.
inline Tensor total(
    at::IntArrayRef sizes, const Tensor& like, const std::optional<Tensor>& bias, const Products& large,
    const Products& small) {
  Tensor out = at::empty(sizes, like.options());
  const bool biased = bias && bias->defined();
  if (biased) out.copy_(bias->expand_as(out));
  if (!small.empty() && small[0].left.scalar_type() != out.scalar_type()) {
    add(out, large, biased);
    Tensor wide = out.to(small[0].left.scalar_type());
    add(wide, small, biased || !large.empty());
    return wide.to(out.scalar_type());
  }
  if (!biased && large.empty() && small.empty()) return out.zero_();
  // The small products first: they write `out` once, and the large ones read it while they compute.
  add(out, small, biased);
  add(out, large, biased || !small.empty());
  return out;
}

inline Tensor multiplied(const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  gemm::multiply(out, a, b, 0, 1, /*sustained=*/true);
  return out;
}

// ---- Pieces

/// The largest rank as a multiple of 8: then all pieces are aligned to 16 bytes.
inline int64_t piece_rank(const Group& g) { return padded_rank(g, 8).expect_int(); }

inline Tensor in_float(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

/// One B: (m, 4, rank), likewise.
inline Tensor pieces_of_b(const Tensor& b, int64_t rank) {
  Tensor out = gemm::space({b.size(0), 4, rank}, b, b.size(1) != rank);
  gemm::store_pieces(kOp, gemm::Use::Weight, out.select(1, 0), rank, {in_float(b)});
  return out;
}

/// The product of bf16 matrices in fp32.
inline Tensor wide_product(const Tensor& a, const Tensor& b) { return at::mm(a, b, at::kFloat); }

/// Three neighbouring pieces of (rows, 4, rank) as columns.
inline Tensor three(const Tensor& pieces, int64_t first) { return pieces.narrow(1, first, 3).flatten(1); }

/// Stores t. Returns the adapters' products for each projection.
inline std::vector<Products> forward_in_pieces(const Tensor& x, const Tensor& t, const Group& g) {
  const int64_t rank = piece_rank(g), ranks = rank * int64_t(g.a.size());
  const Tensor a = gemm::pieces_of(kOp, g.a.vec(), rank);
  const Tensor sums = wide_product(x, a.narrow(0, 0, 3).flatten(0, 1).t());
  const Tensors totals = columns_of(t, g);
  std::vector<Products> out(g.weights.size());
  for (size_t j = 0; j < g.a.size(); ++j) {
    const int64_t own = g.a[j].size(0);
    Tensor pieces = gemm::space({x.size(0), 4, rank}, x, own != rank);
    const gemm::Numbers numbers{sums.narrow(1, int64_t(j) * rank, own), 3, ranks};
    gemm::store_pieces(kOp, gemm::Use::Rows, pieces.select(1, 0), rank, numbers, 1, totals[j]);
    out[g.of[j]].push_back({three(pieces, 0), three(pieces_of_b(g.b[j], rank), 1).t(), g.scale[j]});
  }
  return out;
}

// ---- Kernels

/// Rows with neighbours in the last dimension.
inline Tensor dense_rows(const Tensor& t) { return t.stride(1) == 1 || t.size(1) < 2 ? t : t.contiguous(); }

inline gemm::Adapter all_a(const Tensor& x, const Group& g, int64_t rank) {
  return gemm::stacked(kOp, g.a.vec(), rank, adapter_dtype(x, g));
}

inline gemm::Adapter adapter_b(const Tensor& x, const Group& g, size_t j, int64_t rank) {
  return gemm::stacked(kOp, {g.b[j].t()}, rank, adapter_dtype(x, g));
}

/// Consecutive adapters with one rate of dropout.
struct Run {
  int64_t first, count;
  gemm::Dropped dropped;
};

inline std::vector<Run> runs_of(const Group& g) {
  std::vector<Run> out;
  for (int64_t j = 0; j < int64_t(g.a.size()); ++j) {
    if (!out.empty() && out.back().dropped.rate == g.rate(j)) {
      ++out.back().count;
    } else {
      out.push_back({j, 1, {Tensor(), g.rate(j)}});
    }
  }
  for (Run& run : out) {
    if (run.dropped.rate > 0) run.dropped.seeds = g.seeds.narrow(0, run.first, run.count);
  }
  return out;
}

/// Stores t.
inline void store_t(const Tensor& x, const Tensor& t, const Group& g, int64_t rank) {
  const Tensor rows = dense_rows(x);
  const gemm::Adapter a = all_a(x, g, rank);
  for (const auto& [first, count, dropped] : runs_of(g)) {
    auto own = [&](const auto& of, int64_t dim) { return of.narrow(dim, first * rank, count * rank); };
    gemm::rows_product(kOp, own(t, 1), rows, own(a, 0), rank, gemm::gain_of(dropped.rate), dropped);
  }
}

/// Stores t. Returns the adapters' part of each projection with its bias, or an undefined tensor.
inline Tensors forward_by_kernels(const Tensor& x, const Tensor& t, const OptionalTensors& biases, const Group& g) {
  const int64_t rank = padded_rank(g).expect_int();
  store_t(x, t, g, rank);
  Tensors out(g.weights.size());
  for (size_t j = 0; j < g.a.size(); ++j) {
    Tensor& y = out[g.of[j]];
    Tensor addend = y;
    if (!y.defined()) {
      y = at::empty({x.size(0), g.b[j].size(0)}, x.options());
      const std::optional<Tensor> bias = biases.get(g.of[j]);
      if (bias && bias->defined()) addend = bias->contiguous();
    }
    const Tensor own = t.narrow(1, int64_t(j) * rank, rank);
    gemm::expand(kOp, y, own, adapter_b(x, g, j, rank), g.b[j].size(1), rank, addend, g.scale[j]);
  }
  return out;
}

// ---- Forward

/// x with the dropout of adapter j, in dtype.
inline Tensor dropped_rows(const Tensor& x, const Group& g, size_t j, at::ScalarType dtype) {
  const Tensor rows = x.to(dtype);
  if (g.rate(j) == 0) return rows;
  const Tensor seed = g.seeds.narrow(0, int64_t(j), 1);
  if (core::runs_kernels(x)) return gemm::dropped_on_cuda(kOp, rows, {seed, g.rate(j)});
  return gemm::dropped_on_cpu(rows, *seed.const_data_ptr<int64_t>(), g.rate(j));
}

/// Stores t. Returns the adapters' products for each projection.
inline std::vector<Products> forward_by_gemms(const Tensor& x, Tensor& t, const Group& g) {
  std::vector<Products> out(g.weights.size());
  if (g.a.empty()) return out;
  const auto dtype = t.scalar_type();
  const Tensors a = converted(g.a, dtype), b = converted(g.b, dtype), parts = columns_of(t, g);
  if (!drops(g)) {
    gemm::multiply(t, x.to(dtype), at::cat(a).t(), 0, 1, /*sustained=*/true);
  } else {
    for (size_t j = 0; j < a.size(); ++j) {
      Tensor part = parts[j];
      gemm::multiply(part, dropped_rows(x, g, j, dtype), a[j].t(), 0, 1, /*sustained=*/true);
    }
  }
  for (size_t j = 0; j < b.size(); ++j) out[g.of[j]].push_back({parts[j], b[j].t(), g.scale[j]});
  return out;
}

/// The projections of x as a matrix, and t.
template <class Device>
std::pair<Tensors, Tensor> project(const Tensor& x, const OptionalTensors& biases, const Group& g) {
  Tensors ys;
  const auto t_dtype = takes_kernels(x, g) ? at::kFloat : adapter_dtype(x, g);
  Tensor t = at::empty_symint({x.sym_size(0), all_ranks(x, g)}, x.options().dtype(t_dtype));
  if constexpr (std::is_same_v<Device, Meta>) {
    for (size_t i = 0; i < g.weights.size(); ++i) {
      ys.push_back(at::empty_symint({x.sym_size(0), features_of(g, biases, i)}, x.options()));
    }
  } else {
    Tensors begun(g.weights.size());
    std::vector<Products> small(g.weights.size());
    if (takes_kernels(x, g)) {
      begun = forward_by_kernels(x, t, biases, g);
    } else {
      small = takes_pieces(x, g) ? forward_in_pieces(x, t, g) : forward_by_gemms(x, t, g);
    }
    for (size_t i = 0; i < g.weights.size(); ++i) {
      const Tensor& weight = g.weights[i];
      const Products large = weight.defined() ? Products{{x, weight.t()}} : Products{};
      if (begun[i].defined()) {
        add(begun[i], large, true);
        ys.push_back(begun[i]);
      } else {
        ys.push_back(total({x.size(0), features_of(g, biases, i).expect_int()}, x, biases.get(i), large, small[i]));
      }
    }
  }
  return {std::move(ys), t};
}

// ---- Backward

struct Gradients {
  Tensor x;
  Tensors weights, biases, a, b;

  Tensors all() const {
    Tensors out;
    if (x.defined()) out.push_back(x);
    for (const auto* list : {&weights, &biases, &a, &b}) out.insert(out.end(), list->begin(), list->end());
    return out;
  }
};

/// Computes the gradients of A, and returns that of x or an undefined tensor. u: (T, R), with the ranks of each adapter
/// padded to `rank`.
inline Tensor backward_from_u(
    Gradients& out, const Tensor& u, const Tensor& x, const Group& g, int64_t rank, int64_t wanted) {
  const bool all_digits = adapter_dtype(x, g) == at::kFloat;
  const Tensor rows = dense_rows(x);
  Tensor dx;
  if (core::wants(wanted, kX)) dx = at::empty(x.sizes(), x.options());
  const gemm::Adapter a = dx.defined() ? all_a(x, g, rank) : gemm::Adapter();
  for (const auto& [first, count, dropped] : runs_of(g)) {
    const int64_t start = first * rank, ranks = count * rank;
    if (core::wants(wanted, kA)) {
      const Tensor parts = gemm::columns_product(
          kOp, rows, u.narrow(1, start, ranks), ranks, rank, /*by_feature=*/false, all_digits, 1, dropped);
      for (int64_t k = 0; k < count; ++k) {
        const Tensor& own = g.a[first + k];
        out.a.push_back(parts.narrow(1, k * rank, own.size(0)).sum(0).to(own.scalar_type()));
      }
    }
    if (dx.defined()) {
      const Tensor addend = first > 0 ? dx : Tensor();
      const Tensor own = u.narrow(1, start, ranks);
      gemm::expand(kOp, dx, own, a.narrow(0, start, ranks), ranks, rank, addend, 1, dropped);
    }
  }
  return dx;
}

/// Returns the adapters' part of dx, or an undefined tensor.
inline Tensor backward_by_kernels(
    Gradients& out, const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  const int64_t rank = padded_rank(g).expect_int();
  const bool all_digits = adapter_dtype(x, g) == at::kFloat;
  Tensors dys;
  for (const Tensor& grad : grads) dys.push_back(dense_rows(grad));
  auto of_adapter = [&](const Tensor& of, int64_t j) { return of.narrow(1, j * rank, rank); };
  Tensor u;
  if (core::wants(wanted, kX) || core::wants(wanted, kA)) u = at::empty_like(t);
  for (size_t j = 0; j < g.a.size(); ++j) {
    const Tensor& dy = dys[g.of[j]];
    const int64_t own = g.b[j].size(1);
    const double scale = g.scale[j], u_scale = scale * g.gain(j);
    const gemm::Adapter b = u.defined() ? adapter_b(x, g, j, rank) : gemm::Adapter();
    Tensor parts;  // of the gradient of B
    if (u.defined() && core::wants(wanted, kB)) {
      parts = gemm::rows_and_columns(kOp, of_adapter(u, j), dy, b, of_adapter(t, j), own, u_scale, scale);
    }
    if (u.defined() && !parts.defined()) gemm::rows_product(kOp, of_adapter(u, j), dy, b, rank, u_scale);
    if (!core::wants(wanted, kB)) continue;
    if (!parts.defined()) {
      parts = gemm::columns_product(kOp, dy, of_adapter(t, j), own, rank, /*by_feature=*/true, all_digits, scale);
    }
    out.b.push_back(parts.sum(0).to(g.b[j].scalar_type()));
  }
  return backward_from_u(out, u, x, g, rank, wanted);
}

/// Returns the adapters' products for dx.
inline Products backward_in_pieces(
    Gradients& out, const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  const int64_t rows = x.size(0), n = x.size(1), rank = piece_rank(g), count = g.a.size();
  const int64_t ranks = count * rank;
  const Tensors parts = columns_of(t, g);
  Tensor u;
  if (core::wants(wanted, kX) || core::wants(wanted, kA)) u = at::empty({rows, 4, ranks}, x.options());
  for (int64_t j = 0; j < count; ++j) {
    const Tensor& dy = grads[g.of[j]];
    const int64_t own = g.a[j].size(0);
    if (u.defined()) {
      const Tensor sums = wide_product(dy, three(pieces_of_b(g.b[j], rank), 0));
      const gemm::Numbers numbers{sums.narrow(1, 0, rank), 3, rank};
      gemm::store_pieces(kOp, gemm::Use::Rows, u.select(1, 0).narrow(1, j * rank, rank), ranks, numbers, g.scale[j]);
    }
    if (core::wants(wanted, kB)) {
      Tensor pieces = gemm::space({rows, 4, rank}, x, own != rank);
      gemm::store_pieces(kOp, gemm::Use::Rows, pieces.select(1, 0), rank, {parts[j]});
      const Tensor db = wide_product(dy.t(), three(pieces, 1)).view({dy.size(1), 3, rank}).sum(1).mul_(g.scale[j]);
      out.b.push_back(db.narrow(1, 0, own).to(g.b[j].scalar_type()).contiguous());
    }
  }
  if (core::wants(wanted, kA)) {
    const Tensor all = wide_product(three(u, 1).t(), x).view({3, count, rank, n});
    for (int64_t j = 0; j < count; ++j) {
      out.a.push_back(all.select(1, j).sum(0).narrow(0, 0, g.a[j].size(0)).to(g.a[j].scalar_type()));
    }
  }
  if (!core::wants(wanted, kX)) return {};
  return {{three(u, 0), gemm::pieces_of(kOp, g.a.vec(), rank).narrow(0, 1, 3).flatten(0, 1)}};
}

/// Returns the adapters' products for dx.
inline Products backward_by_gemms(
    Gradients& out, const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  if (g.a.empty()) return {};
  const auto dtype = t.scalar_type();
  const Tensors a = converted(g.a, dtype), b = converted(g.b, dtype), parts = columns_of(t, g);
  Tensors dys, us;
  Products products;
  for (const Tensor& dy : grads) dys.push_back(dy.to(dtype));
  for (size_t j = 0; j < a.size(); ++j) {
    const Tensor& dy = dys[g.of[j]];
    us.push_back(multiplied(dy, b[j]).mul_(g.scale[j]));
    if (core::wants(wanted, kB)) {
      out.b.push_back(multiplied(dy.t(), parts[j]).mul_(g.scale[j]).to(g.b[j].scalar_type()));
    }
    if (!core::wants(wanted, kX)) continue;
    if (g.rate(j) > 0) {
      products.push_back({dropped_rows(multiplied(us[j], a[j]), g, j, dtype)});
    } else {
      products.push_back({us[j], a[j]});
    }
  }
  if (!core::wants(wanted, kA)) return products;
  if (drops(g)) {
    for (size_t j = 0; j < a.size(); ++j) {
      out.a.push_back(multiplied(us[j].t(), dropped_rows(x, g, j, dtype)).to(g.a[j].scalar_type()));
    }
    return products;
  }
  // All of them read x once. Results of an operator must not share memory.
  const Tensor da = multiplied(at::cat(us, 1).t(), x.to(dtype));
  int64_t first = 0;
  for (const Tensor& a : g.a) {
    const Tensor own = da.narrow(0, first, a.size(0)).to(a.scalar_type());
    out.a.push_back(g.a.size() > 1 ? own.clone() : own);
    first += a.size(0);
  }
  return products;
}

template <class Device>
Gradients gradients(const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  Gradients out;
  const size_t projections = g.weights.size();
  if constexpr (std::is_same_v<Device, Meta>) {
    if (core::wants(wanted, kX)) out.x = at::empty_like(x, at::MemoryFormat::Contiguous);
    for (const Tensor& weight : g.weights) {
      if (!weight.defined()) continue;
      if (core::wants(wanted, kWeights)) out.weights.push_back(at::empty_like(weight, at::MemoryFormat::Contiguous));
      if (core::wants(wanted, kBiases)) out.biases.push_back(at::empty_symint({weight.sym_size(0)}, x.options()));
    }
    for (size_t j = 0; j < g.a.size(); ++j) {
      if (core::wants(wanted, kA)) out.a.push_back(at::empty_like(g.a[j], at::MemoryFormat::Contiguous));
      if (core::wants(wanted, kB)) out.b.push_back(at::empty_like(g.b[j], at::MemoryFormat::Contiguous));
    }
    return out;
  }
  for (size_t i = 0; i < projections; ++i) {
    if (!g.weights[i].defined()) continue;
    if (core::wants(wanted, kWeights)) out.weights.push_back(multiplied(grads[i].t(), x));
    if (core::wants(wanted, kBiases)) out.biases.push_back(grads[i].sum(0));
  }
  Products small;
  if (takes_kernels(x, g)) {
    out.x = backward_by_kernels(out, grads, x, t, g, wanted);
  } else {
    small = (takes_pieces(x, g) ? backward_in_pieces : backward_by_gemms)(out, grads, x, t, g, wanted);
  }
  if (core::wants(wanted, kX)) {
    Products large;
    for (size_t i = 0; i < projections; ++i) {
      if (g.weights[i].defined()) large.push_back({grads[i], g.weights[i]});
    }
    if (out.x.defined()) {
      add(out.x, large, true);
    } else {
      out.x = total(x.sizes(), x, std::nullopt, large, small);
    }
  }
  return out;
}

}  // namespace liger::ops::lora_linear
