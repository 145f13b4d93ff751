// lora_linear(x, weight, a, b, scale, bias) = F.linear(x, weight, bias) + sum_j scale_j (x A_j^T) B_j^T, and several such
// projections of one x.
//
// Shapes: x (T, n), W (m, n), A (r, n), B (m, r); t = x A^T and u = scale dy B are (T, r). R: the ranks of a group together.
//
//   y  = x W^T + scale t B^T         dA = u^T x
//   dx = dy W + u A                  dB = scale dy^T t
//
// All A of a group are multiplied with x in one pass, and sums accumulate in GEMMs. Four forms:
//
//   kernels   on CUDA, x in 16 bits, adapters of its dtype or, beside bf16, in fp32, of few ranks or with dropout:
//             gemm/lora_products.h. t is in fp32, with the ranks of each adapter padded.
//   plain     the adapters have x's dtype.
//   pieces    x in bf16, adapters in fp32, on CUDA: A, B, t and u are split into three bf16 pieces, see
//             liger_ops/kernels/gemm/lora_linear.py.
//   wide      otherwise: x and dy are converted.
//
// In the last three t is in the adapters' dtype. Dropout drops elements of x in the adapters' products only, and multiplies
// the others by 1 / (1 - rate). t and u contain that factor.

#include <ATen/ATen.h>

#include <algorithm>

#include "core/cuda.h"
#include "core/operator.h"
#include "core/rows.h"
#include "gemm/lora_dropout.h"
#include "gemm/lora_products.h"
#include "gemm/multiply.h"
#include "kernels/lora_linear.h"
#include "runtime/status.h"

namespace liger::ops::lora_linear {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;
using OptionalTensors = c10::List<std::optional<Tensor>>;
using Scales = at::ArrayRef<double>;

constexpr const char* kOp = "lora_linear";
constexpr const char* kBackward = "lora_linear backward";

// Gradients that backward computes.
constexpr int64_t kWantA = 8, kWantB = 16;

struct Cpu {};
struct Cuda {};
struct Meta {};

/// of[j]: the projection to which adapter j belongs. dropout: a rate for each adapter, or empty. Where a weight is undefined,
/// another layer multiplies it with x, and only the adapters are computed here.
struct Group {
  TensorList weights, a, b;
  Scales scale;
  at::IntArrayRef of;
  Tensor seeds;
  Scales dropout;

  double rate(size_t j) const { return dropout.empty() ? 0 : dropout[j]; }
  double gain(size_t j) const { return gemm::gain_of(rate(j)); }
};

// ---- Checks

void check_matrix(const char* op, const std::string& name, const Tensor& t, const Tensor& x) {
  core::check_dense(op, name.c_str(), t);
  core::check_same_device(op, name.c_str(), t, "x", x);
  LIGER_CHECK(t.dim() == 2, op, name, "have two dimensions", t.sym_sizes());
}

/// result: of another layer, to which adapters are added.
void check_result(const char* op, const Tensor& x, const std::optional<Tensor>& result) {
  if (!result || !result->defined()) return;
  core::check_dense(op, "bias", *result);
  core::check_same_device(op, "bias", *result, "x", x);
  LIGER_CHECK(
      result->scalar_type() == x.scalar_type(), op, "bias", c10::str("have the dtype of x, ", x.scalar_type()),
      result->scalar_type());
  auto rows = [](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - 1); };
  LIGER_CHECK(
      result->dim() == x.dim() && rows(*result).equals(rows(x)), op, "bias",
      c10::str("have the shape of x, ", x.sym_sizes(), ", except for the last dimension, if its weight is None"),
      result->sym_sizes());
}

void check_projection(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!weight.defined()) return check_result(op, x, bias);
  check_matrix(op, "weight", weight, x);
  const auto like_x = c10::str("have the dtype of x, ", x.scalar_type());
  LIGER_CHECK(weight.scalar_type() == x.scalar_type(), op, "weight", like_x, weight.scalar_type());
  LIGER_CHECK(
      weight.sym_size(1) == x.sym_sizes().back(), op, "weight",
      c10::str("have shape [features, ", x.sym_sizes().back(), "], the last dimension of x"), weight.sym_sizes());
  if (!bias || !bias->defined()) return;
  core::check_dense(op, "bias", *bias);
  core::check_same_device(op, "bias", *bias, "x", x);
  LIGER_CHECK(bias->scalar_type() == x.scalar_type(), op, "bias", like_x, bias->scalar_type());
  LIGER_CHECK(
      bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, "bias",
      c10::str("have shape [", weight.sym_size(0), "], one value per feature"), bias->sym_sizes());
}

c10::SymInt features_of(const Group& g, const OptionalTensors& biases, int64_t i) {
  if (g.weights[i].defined()) return g.weights[i].sym_size(0);
  const std::optional<Tensor> result = biases.get(i);
  if (result && result->defined()) return result->sym_sizes().back();
  const auto* first = std::find(g.of.begin(), g.of.end(), i);
  LIGER_CHECK(
      first != g.of.end(), kOp, "bias", "be another layer's result if there are no weight and no adapters", "None");
  return g.b[first - g.of.begin()].sym_size(0);
}

/// A or B.
void check_adapter(const char* op, const std::string& name, const Tensor& t, const Tensor& x) {
  check_matrix(op, name, t, x);
  const auto dtype = t.scalar_type();
  LIGER_CHECK(
      dtype == x.scalar_type() || (dtype == at::kFloat && x.scalar_type() != at::kDouble), op, name,
      c10::str("be float32 or have the dtype of x, ", x.scalar_type()), dtype);
}

void check_a(const char* op, const std::string& name, const Tensor& a, const Tensor& x) {
  check_adapter(op, name, a, x);
  LIGER_CHECK(
      a.sym_size(1) == x.sym_sizes().back(), op, name,
      c10::str("have shape [rank, ", x.sym_sizes().back(), "], the last dimension of x"), a.sym_sizes());
}

void check_adapters(const char* op, const Tensor& x, const Group& g, const OptionalTensors& biases) {
  const size_t count = g.a.size();
  const auto as_many = c10::str("have as many entries as a, ", count);
  LIGER_CHECK(g.b.size() == count, op, "b", as_many, g.b.size());
  LIGER_CHECK(g.scale.size() == count, op, "scale", as_many, g.scale.size());
  for (size_t j = 0; j < count; ++j) {
    const std::string a = c10::str("a[", j, "]"), b = c10::str("b[", j, "]");
    check_adapter(op, b, g.b[j], x);
    check_a(op, a, g.a[j], x);
    const auto features = features_of(g, biases, g.of[j]), rank = g.a[j].sym_size(0);
    LIGER_CHECK(
        g.b[j].sym_size(0) == features && g.b[j].sym_size(1) == rank, op, b,
        c10::str("have shape [", features, ", ", rank, "], the features of weight and the rank of ", a),
        g.b[j].sym_sizes());
  }
}

void check_dropout(const char* op, const Tensor& x, const Group& g) {
  if (g.dropout.empty()) return;
  const int64_t count = g.a.size();
  const auto as_many = c10::str("have as many entries as a, ", count);
  LIGER_CHECK(int64_t(g.dropout.size()) == count, op, "dropout", as_many, g.dropout.size());
  for (const double rate : g.dropout) LIGER_CHECK(rate >= 0 && rate <= 1, op, "dropout", "be between 0 and 1", rate);
  LIGER_CHECK(g.seeds.defined(), op, "seeds", "be given with dropout", "None");
  core::check_same_device(op, "seeds", g.seeds, "x", x);
  LIGER_CHECK(g.seeds.scalar_type() == at::kLong, op, "seeds", "be int64", g.seeds.scalar_type());
  LIGER_CHECK(g.seeds.dim() == 1 && g.seeds.sym_size(0) == count, op, "seeds", as_many, g.seeds.sym_sizes());
}

// ---- Forms

bool has_dtype(const Group& g, at::ScalarType dtype) {
  auto fits = [&](const Tensor& t) { return t.scalar_type() == dtype; };
  return std::all_of(g.a.begin(), g.a.end(), fits) && std::all_of(g.b.begin(), g.b.end(), fits);
}

bool drops(const Group& g) {
  return std::any_of(g.dropout.begin(), g.dropout.end(), [](double rate) { return rate > 0; });
}

// With more ranks per adapter, cuBLAS is faster.
constexpr int64_t kMostRanks = 32;

/// Whether the kernels compute products of x and these adapters.
bool has_kernels(const Tensor& x, const Group& g) {
  const auto dtype = x.scalar_type();
  return x.is_cuda() && (dtype == at::kBFloat16 || (dtype == at::kHalf && has_dtype(g, at::kHalf)));
}

bool takes_kernels(const Tensor& x, const Group& g) {
  if (g.a.empty() || !has_kernels(x, g)) return false;
  auto has_few = [](const Tensor& a) { return a.sym_size(0) <= kMostRanks; };
  return drops(g) || std::all_of(g.a.begin(), g.a.end(), has_few);
}

bool takes_pieces(const Tensor& x, const Group& g) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && !g.a.empty() && !has_dtype(g, at::kBFloat16);
}

/// The dtype in which the adapters' products are computed. Kernels convert to it as they load.
at::ScalarType adapter_dtype(const Tensor& x, const Group& g) {
  return has_dtype(g, x.scalar_type()) ? x.scalar_type() : core::compute_type(x);
}

/// The largest rank, padded.
c10::SymInt padded_rank(const Group& g) {
  constexpr int kStep = kernels::constants::lora_products::RANK_STEP;
  c10::SymInt rank = 0;
  for (const Tensor& a : g.a) rank = rank.max(a.sym_size(0));
  return (rank + (kStep - 1)) / kStep * kStep;
}

/// The columns of t.
c10::SymInt all_ranks(const Tensor& x, const Group& g) {
  if (takes_kernels(x, g)) return padded_rank(g) * int64_t(g.a.size());
  c10::SymInt ranks = 0;
  for (const Tensor& a : g.a) ranks = ranks + a.sym_size(0);
  return ranks;
}

Tensors converted(TensorList list, at::ScalarType dtype) {
  Tensors out;
  for (const Tensor& t : list) out.push_back(t.to(dtype));
  return out;
}

/// The columns of each adapter.
Tensors columns_of(const Tensor& t, const Group& g) {
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
void add(Tensor& out, const Products& products, bool accumulates) {
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
Tensor total(
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

Tensor multiplied(const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  gemm::multiply(out, a, b, 0, 1, /*sustained=*/true);
  return out;
}

// ---- Pieces

/// The largest rank as a multiple of 8: then all pieces are aligned to 16 bytes.
int64_t piece_rank(const Group& g) {
  int64_t rank = 0;
  for (const Tensor& a : g.a) rank = std::max(rank, a.size(0));
  return (rank + 7) / 8 * 8;
}

enum class Use { Rows, Weight };

/// fp32 numbers (rows, columns), each the sum of `parts` summands at a distance of `part_stride`.
struct Numbers {
  Tensor first;
  int64_t parts = 1, part_stride = 0;
};

/// Stores the pieces of numbers times scale at `out` (rows, columns) and three times further at a distance of `distance`,
/// and the numbers at `total`, if that is defined.
void store_pieces(
    Use use, const Tensor& out, int64_t distance, const Numbers& numbers, double scale = 1, const Tensor& total = {}) {
  using K = kernels::lora_pieces;
  namespace constants = kernels::constants::lora_linear;
  const int64_t rows = numbers.first.size(0), columns = numbers.first.size(1), count = rows * columns;
  if (count == 0) return;
  // Indices of the last program must not overflow.
  LIGER_CHECK(count <= INT32_MAX - constants::BLOCK, kOp, "rows times rank", "be below 2^31 - 1024", count);
  const bool has_total = total.defined();
  K::Args args{
      core::address(out),
      core::address(total),
      core::address(numbers.first),
      int32_t(count),
      int32_t(columns),
      int32_t(numbers.parts),
      numbers.first.stride(0),
      numbers.part_stride,
      has_total ? total.stride(0) : 0,
      out.stride(0),
      distance,
      float(scale),
      has_total ? constants::HAS_TOTAL : 0};
  const auto point = runtime::point_of<K>(use == Use::Weight ? 1 : 0);
  const auto& config = runtime::first_fit<K>(columns, false, point);
  const auto programs = uint32_t((count + constants::BLOCK - 1) / constants::BLOCK);
  core::launch<K>(kOp, out.device(), runtime::variant_index<K>(config, point), {programs}, args);
}

/// An uninitialised tensor, or zeros where padding will not be written.
Tensor space(at::IntArrayRef sizes, const Tensor& like, bool padded) {
  const auto options = like.options().dtype(at::kBFloat16);
  return padded ? at::zeros(sizes, options) : at::empty(sizes, options);
}

Tensor in_float(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

/// All A: (4, R, n), with R for padded ranks. The first three are all digits, the last three those of a product with pieces
/// of rows.
Tensor pieces_of_a(const Group& g, int64_t rank, int64_t n) {
  const int64_t count = g.a.size(), ranks = count * rank;
  const bool padded = std::any_of(g.a.begin(), g.a.end(), [&](const Tensor& a) { return a.size(0) != rank; });
  Tensor out = space({4, ranks, n}, g.a[0], padded);
  for (int64_t j = 0; j < count; ++j) {
    store_pieces(Use::Weight, out[0].narrow(0, j * rank, rank), ranks * n, {in_float(g.a[j])});
  }
  return out;
}

/// One B: (m, 4, rank), likewise.
Tensor pieces_of_b(const Tensor& b, int64_t rank) {
  Tensor out = space({b.size(0), 4, rank}, b, b.size(1) != rank);
  store_pieces(Use::Weight, out.select(1, 0), rank, {in_float(b)});
  return out;
}

/// The product of bf16 matrices in fp32.
Tensor wide_product(const Tensor& a, const Tensor& b) { return at::mm(a, b, at::kFloat); }

/// Three neighbouring pieces of (rows, 4, rank) as columns.
Tensor three(const Tensor& pieces, int64_t first) { return pieces.narrow(1, first, 3).flatten(1); }

/// Stores t. Returns the adapters' products for each projection.
std::vector<Products> forward_in_pieces(const Tensor& x, const Tensor& t, const Group& g) {
  const int64_t n = x.size(1), rank = piece_rank(g), ranks = rank * int64_t(g.a.size());
  const Tensor a = pieces_of_a(g, rank, n);
  const Tensor sums = wide_product(x, a.narrow(0, 0, 3).flatten(0, 1).t());
  const Tensors totals = columns_of(t, g);
  std::vector<Products> out(g.weights.size());
  for (size_t j = 0; j < g.a.size(); ++j) {
    const int64_t own = g.a[j].size(0);
    Tensor pieces = space({x.size(0), 4, rank}, x, own != rank);
    const Numbers numbers{sums.narrow(1, int64_t(j) * rank, own), 3, ranks};
    store_pieces(Use::Rows, pieces.select(1, 0), rank, numbers, 1, totals[j]);
    out[g.of[j]].push_back({three(pieces, 0), three(pieces_of_b(g.b[j], rank), 1).t(), g.scale[j]});
  }
  return out;
}

// ---- Kernels

/// Rows with neighbours in the last dimension.
Tensor dense_rows(const Tensor& t) { return t.stride(1) == 1 || t.size(1) < 2 ? t : t.contiguous(); }

/// All A as one matrix, padded.
Tensor stacked(const Tensor& x, const Group& g, int64_t rank) {
  Tensors list = converted(g.a, adapter_dtype(x, g));
  if (list.size() == 1 && list[0].size(0) == rank) return dense_rows(list[0]);
  for (Tensor& a : list) {
    if (a.size(0) < rank) a = at::constant_pad_nd(a, {0, 0, 0, rank - a.size(0)});
  }
  return at::cat(list);
}

/// Consecutive adapters with one rate of dropout.
struct Run {
  int64_t first, count;
  gemm::Dropped dropped;
};

std::vector<Run> runs_of(const Group& g) {
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

gemm::Adapter adapter_b(const Tensor& x, const Group& g, size_t j) {
  return {dense_rows(g.b[j].to(adapter_dtype(x, g))), /*by_feature=*/true};
}

/// Stores t.
void store_t(const Tensor& x, const Tensor& t, const Group& g, int64_t rank) {
  const Tensor rows = dense_rows(x), a = stacked(x, g, rank);
  for (const auto& [first, count, dropped] : runs_of(g)) {
    auto own = [&](const Tensor& of, int64_t dim) { return of.narrow(dim, first * rank, count * rank); };
    gemm::rows_product(kOp, own(t, 1), rows, {own(a, 0)}, rank, gemm::gain_of(dropped.rate), dropped);
  }
}

/// Stores t. Returns the adapters' part of each projection with its bias, or an undefined tensor.
Tensors forward_by_kernels(const Tensor& x, const Tensor& t, const OptionalTensors& biases, const Group& g) {
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
    gemm::expand(kOp, y, t.narrow(1, int64_t(j) * rank, rank), adapter_b(x, g, j), rank, addend, g.scale[j]);
  }
  return out;
}

// ---- Forward

/// x with the dropout of adapter j, in dtype.
Tensor dropped_rows(const Tensor& x, const Group& g, size_t j, at::ScalarType dtype) {
  const Tensor rows = x.to(dtype);
  if (g.rate(j) == 0) return rows;
  const Tensor seed = g.seeds.narrow(0, int64_t(j), 1);
  if (x.is_cuda()) return gemm::dropped_on_cuda(kOp, rows, {seed, g.rate(j)});
  return gemm::dropped_on_cpu(rows, *seed.const_data_ptr<int64_t>(), g.rate(j));
}

/// Stores t. Returns the adapters' products for each projection.
std::vector<Products> forward_by_gemms(const Tensor& x, Tensor& t, const Group& g) {
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
Tensor backward_from_u(Gradients& out, const Tensor& u, const Tensor& x, const Group& g, int64_t rank, int64_t wanted) {
  const bool all_digits = adapter_dtype(x, g) == at::kFloat;
  const Tensor rows = dense_rows(x);
  Tensor dx;
  if (wanted & core::kWantInput) dx = at::empty(x.sizes(), x.options());
  const Tensor a = dx.defined() ? stacked(x, g, rank) : Tensor();
  for (const auto& [first, count, dropped] : runs_of(g)) {
    const int64_t start = first * rank, ranks = count * rank;
    if (wanted & kWantA) {
      const Tensor parts = gemm::columns_product(
          kOp, rows, u.narrow(1, start, ranks), ranks, rank, /*by_feature=*/false, all_digits, 1, dropped);
      for (int64_t k = 0; k < count; ++k) {
        const Tensor& own = g.a[first + k];
        out.a.push_back(parts.narrow(1, k * rank, own.size(0)).sum(0).to(own.scalar_type()));
      }
    }
    if (dx.defined()) {
      const Tensor addend = first > 0 ? dx : Tensor();
      gemm::expand(kOp, dx, u.narrow(1, start, ranks), {a.narrow(0, start, ranks)}, rank, addend, 1, dropped);
    }
  }
  return dx;
}

/// Returns the adapters' part of dx, or an undefined tensor.
Tensor backward_by_kernels(
    Gradients& out, const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  const int64_t rank = padded_rank(g).expect_int();
  const bool all_digits = adapter_dtype(x, g) == at::kFloat;
  Tensors dys;
  for (const Tensor& grad : grads) dys.push_back(dense_rows(grad));
  auto of_adapter = [&](const Tensor& of, int64_t j) { return of.narrow(1, j * rank, rank); };
  Tensor u;
  if (wanted & (core::kWantInput | kWantA)) u = at::empty_like(t);
  for (size_t j = 0; j < g.a.size(); ++j) {
    const Tensor& dy = dys[g.of[j]];
    if (u.defined()) gemm::rows_product(kOp, of_adapter(u, j), dy, adapter_b(x, g, j), rank, g.scale[j] * g.gain(j));
    if (wanted & kWantB) {
      const int64_t own = g.b[j].size(1);
      const Tensor parts =
          gemm::columns_product(kOp, dy, of_adapter(t, j), own, rank, /*by_feature=*/true, all_digits, g.scale[j]);
      out.b.push_back(parts.sum(0).to(g.b[j].scalar_type()));
    }
  }
  return backward_from_u(out, u, x, g, rank, wanted);
}

/// Returns the adapters' products for dx.
Products backward_in_pieces(
    Gradients& out, const Tensors& grads, const Tensor& x, const Tensor& t, const Group& g, int64_t wanted) {
  const int64_t rows = x.size(0), n = x.size(1), rank = piece_rank(g), count = g.a.size();
  const int64_t ranks = count * rank;
  const Tensors parts = columns_of(t, g);
  Tensor u;
  if (wanted & (core::kWantInput | kWantA)) u = at::empty({rows, 4, ranks}, x.options());
  for (int64_t j = 0; j < count; ++j) {
    const Tensor& dy = grads[g.of[j]];
    const int64_t own = g.a[j].size(0);
    if (u.defined()) {
      const Tensor sums = wide_product(dy, three(pieces_of_b(g.b[j], rank), 0));
      const Numbers numbers{sums.narrow(1, 0, rank), 3, rank};
      store_pieces(Use::Rows, u.select(1, 0).narrow(1, j * rank, rank), ranks, numbers, g.scale[j]);
    }
    if (wanted & kWantB) {
      Tensor pieces = space({rows, 4, rank}, x, own != rank);
      store_pieces(Use::Rows, pieces.select(1, 0), rank, {parts[j]});
      const Tensor db = wide_product(dy.t(), three(pieces, 1)).view({dy.size(1), 3, rank}).sum(1).mul_(g.scale[j]);
      out.b.push_back(db.narrow(1, 0, own).to(g.b[j].scalar_type()).contiguous());
    }
  }
  if (wanted & kWantA) {
    const Tensor all = wide_product(three(u, 1).t(), x).view({3, count, rank, n});
    for (int64_t j = 0; j < count; ++j) {
      out.a.push_back(all.select(1, j).sum(0).narrow(0, 0, g.a[j].size(0)).to(g.a[j].scalar_type()));
    }
  }
  if (!(wanted & core::kWantInput)) return {};
  return {{three(u, 0), pieces_of_a(g, rank, n).narrow(0, 1, 3).flatten(0, 1)}};
}

/// Returns the adapters' products for dx.
Products backward_by_gemms(
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
    if (wanted & kWantB) out.b.push_back(multiplied(dy.t(), parts[j]).mul_(g.scale[j]).to(g.b[j].scalar_type()));
    if (!(wanted & core::kWantInput)) continue;
    if (g.rate(j) > 0) {
      products.push_back({dropped_rows(multiplied(us[j], a[j]), g, j, dtype)});
    } else {
      products.push_back({us[j], a[j]});
    }
  }
  if (!(wanted & kWantA)) return products;
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
    if (wanted & core::kWantInput) out.x = at::empty_like(x, at::MemoryFormat::Contiguous);
    for (const Tensor& weight : g.weights) {
      if (!weight.defined()) continue;
      if (wanted & core::kWantWeight) out.weights.push_back(at::empty_like(weight, at::MemoryFormat::Contiguous));
      if (wanted & core::kWantBias) out.biases.push_back(at::empty_symint({weight.sym_size(0)}, x.options()));
    }
    for (size_t j = 0; j < g.a.size(); ++j) {
      if (wanted & kWantA) out.a.push_back(at::empty_like(g.a[j], at::MemoryFormat::Contiguous));
      if (wanted & kWantB) out.b.push_back(at::empty_like(g.b[j], at::MemoryFormat::Contiguous));
    }
    return out;
  }
  for (size_t i = 0; i < projections; ++i) {
    if (!g.weights[i].defined()) continue;
    if (wanted & core::kWantWeight) out.weights.push_back(multiplied(grads[i].t(), x));
    if (wanted & core::kWantBias) out.biases.push_back(grads[i].sum(0));
  }
  Products small;
  if (takes_kernels(x, g)) {
    out.x = backward_by_kernels(out, grads, x, t, g, wanted);
  } else {
    small = (takes_pieces(x, g) ? backward_in_pieces : backward_by_gemms)(out, grads, x, t, g, wanted);
  }
  if (wanted & core::kWantInput) {
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

// ---- Several projections of one x, for liger_ops/adapters.py

/// Before a computation. Autocast must not change the dtypes of its GEMMs.
template <class Device>
struct Entry {
  explicit Entry(const Tensor& x) : guard(x.device()) {
    if constexpr (std::is_same_v<Device, Cpu>) runtime::count_cpu_call();
  }

  c10::DeviceGuard guard;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// y as the rows of x. Not a view, so that its memory can be used again.
Tensor in_rows_of(const Tensor& x, const Tensor& y) {
  at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = y.sym_sizes().back();
  return at::_unsafe_view_symint(y, sizes);
}

Tensors matrices(TensorList list) {
  Tensors out;
  for (const Tensor& t : list) out.push_back(core::as_matrix(t));
  return out;
}

/// None becomes an undefined tensor.
Tensors tensors_of(const OptionalTensors& list) {
  Tensors out;
  for (size_t i = 0; i < list.size(); ++i) out.push_back(list.get(i).value_or(Tensor()));
  return out;
}

/// Where a weight is None, `biases` may have the result of another layer, (..., m).
template <class Device>
Tensors projections(
    const Tensor& x, const OptionalTensors& weights, const OptionalTensors& biases, TensorList a, TensorList b,
    Scales scale, at::IntArrayRef of, const std::optional<Tensor>& seeds, Scales dropout) {
  core::check_activation(kOp, "x", x);
  LIGER_CHECK(
      biases.size() == weights.size(), kOp, "biases", c10::str("have ", weights.size(), " entries"), biases.size());
  LIGER_CHECK(of.size() == a.size(), kOp, "of", c10::str("have ", a.size(), " entries"), of.size());
  const Tensors present = tensors_of(weights);
  const Group g{present, a, b, scale, of, seeds.value_or(Tensor()), dropout};
  OptionalTensors summands = biases.copy();
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::optional<Tensor> bias = biases.get(i);
    check_projection(kOp, x, present[i], bias);
    if (!present[i].defined() && bias && bias->defined()) summands.set(i, core::as_matrix(*bias));
  }
  check_adapters(kOp, x, g, biases);
  check_dropout(kOp, x, g);
  const Entry<Device> entry(x);
  auto [ys, t] = project<Device>(core::as_matrix(x), summands, g);
  ys.push_back(std::move(t));
  for (Tensor& y : ys) y = in_rows_of(x, y);
  return std::move(ys);
}

/// The gradients of x, weights, biases, a and b, of those that are wanted. A weight that is None has no gradient, and dx lacks
/// that of its layer.
template <class Device>
Tensors projections_bwd(
    TensorList grads, const Tensor& x, const OptionalTensors& weights, TensorList a, TensorList b, const Tensor& t,
    int64_t wanted, Scales scale, at::IntArrayRef of, const std::optional<Tensor>& seeds, Scales dropout) {
  const Entry<Device> entry(x);
  const Tensors present = tensors_of(weights);
  const Group g{present, a, b, scale, of, seeds.value_or(Tensor()), dropout};
  Gradients out = gradients<Device>(matrices(grads), core::as_matrix(x), core::as_matrix(t), g, wanted);
  if (out.x.defined()) out.x = in_rows_of(x, out.x);
  return out.all();
}

// ---- The low-rank input of a head, for liger_ops/adapters.py

/// scale_j * drop(x) A_j^T of all adapters side by side, (..., R) in fp32, or in fp64 for fp64.
template <class Device>
Tensor low_rank_input(const Tensor& x, TensorList a, Scales scale, const std::optional<Tensor>& seeds, Scales dropout) {
  const Group g{{}, a, {}, scale, {}, seeds.value_or(Tensor()), dropout};
  const auto as_many = c10::str("have as many entries as a, ", a.size());
  core::check_activation(kOp, "x", x);
  LIGER_CHECK(!a.empty(), kOp, "a", "have an entry", 0);
  LIGER_CHECK(scale.size() == a.size(), kOp, "scale", as_many, scale.size());
  for (size_t j = 0; j < a.size(); ++j) check_a(kOp, c10::str("a[", j, "]"), a[j], x);
  check_dropout(kOp, x, g);
  const Entry<Device> entry(x);
  const auto options = x.options().dtype(core::compute_type(x));
  if constexpr (std::is_same_v<Device, Meta>) {
    at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() = 0;
    for (const Tensor& each : a) sizes.back() = sizes.back() + each.sym_size(0);
    return at::empty_symint(sizes, options);
  }
  const Tensor rows = core::as_matrix(x);
  Tensors parts;
  if (has_kernels(x, g)) {
    const int64_t rank = padded_rank(g).expect_int();
    const Tensor t = at::empty({rows.size(0), int64_t(a.size()) * rank}, options);
    store_t(rows, t, g, rank);
    for (size_t j = 0; j < a.size(); ++j) parts.push_back(t.narrow(1, int64_t(j) * rank, a[j].size(0)) * scale[j]);
  } else {
    const auto dtype = core::compute_type(x);
    for (size_t j = 0; j < a.size(); ++j) {
      parts.push_back(at::mm(dropped_rows(rows, g, j, dtype), a[j].to(dtype).t()).mul_(scale[j]));
    }
  }
  return in_rows_of(x, at::cat(parts, 1));
}

/// The gradients of x and a, of those that are wanted.
template <class Device>
Tensors low_rank_input_bwd(
    const Tensor& grad, const Tensor& x, TensorList a, int64_t wanted, Scales scale, const std::optional<Tensor>& seeds,
    Scales dropout) {
  const Group g{{}, a, {}, scale, {}, seeds.value_or(Tensor()), dropout};
  const Entry<Device> entry(x);
  Gradients out;
  if constexpr (std::is_same_v<Device, Meta>) {
    if (wanted & core::kWantInput) out.x = at::empty_like(x, at::MemoryFormat::Contiguous);
    for (const Tensor& each : a) {
      if (wanted & kWantA) out.a.push_back(at::empty_like(each, at::MemoryFormat::Contiguous));
    }
    return out.all();
  }
  const Tensor rows = core::as_matrix(x);
  const Tensors grads = columns_of(core::as_matrix(grad), g);
  if (has_kernels(x, g)) {
    const int64_t rank = padded_rank(g).expect_int();
    const Tensor u = at::zeros({rows.size(0), int64_t(a.size()) * rank}, grad.options());
    for (size_t j = 0; j < a.size(); ++j) {
      u.narrow(1, int64_t(j) * rank, a[j].size(0)).copy_(grads[j] * (scale[j] * g.gain(j)));
    }
    out.x = backward_from_u(out, u, rows, g, rank, wanted);
  } else {
    const auto dtype = grad.scalar_type();
    Tensor sum;
    for (size_t j = 0; j < a.size(); ++j) {
      const Tensor u = grads[j] * scale[j];
      if (wanted & kWantA) {
        out.a.push_back(at::mm(u.t(), dropped_rows(rows, g, j, dtype)).to(a[j].scalar_type()));
      }
      if (!(wanted & core::kWantInput)) continue;
      const Tensor dx = dropped_rows(at::mm(u, a[j].to(dtype)), g, j, dtype);
      sum = sum.defined() ? sum.add_(dx) : dx;
    }
    if (sum.defined()) out.x = sum.to(x.scalar_type());
  }
  if (out.x.defined()) out.x = in_rows_of(x, out.x);
  return out.all();
}

// ---- The operator

struct LoraLinear
    : core::Operator<
          LoraLinear,
          Tensor(const Tensor&, const Tensor&, TensorList, TensorList, Scales, const std::optional<Tensor>&)> {
  static constexpr const char* kOp = lora_linear::kOp;
  static constexpr const char* kSchema = schemas::lora_linear;
  using Edges = core::Positions<0, 1, 2, 3, 5>;
  using Forward = std::tuple<Tensor, Tensor>;
  using Autocast = core::AutocastLinear<0, 1, 2, 3, 5>;
  using Cpu = lora_linear::Cpu;
  using Cuda = lora_linear::Cuda;
  using Meta = lora_linear::Meta;

  template <class Device>
  static Forward run(
      bool, const Tensor& x, const Tensor& weight, TensorList a, TensorList b, Scales scale,
      const std::optional<Tensor>& bias) {
    core::check_activation(kOp, "x", x);
    check_projection(kOp, x, weight, bias);
    const std::vector<int64_t> of(a.size(), 0);
    const Group g{weight, a, b, scale, of, {}, {}};
    const OptionalTensors biases({bias});
    check_adapters(kOp, x, g, biases);
    const Entry<Device> entry(x);
    auto [ys, t] = project<Device>(core::as_matrix(x), biases, g);
    return {in_rows_of(x, ys[0]), in_rows_of(x, t)};
  }

  /// Saves x, weight, t, all a, all b.
  struct Node : core::BackwardNode<Node, core::kAnyNumber> {
    std::tuple<std::vector<double>> options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    void record(
        const Forward& out, const Tensor& x, const Tensor& weight, TensorList a, TensorList b, const Scales&,
        const std::optional<Tensor>&) {
      const auto& [y, t] = out;
      save_all({x, weight, t});
      save_all(a);
      save_all(b);
      connect(y);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      const auto& [scale] = options;
      const size_t count = scale.size(), edges = 3 + 2 * count;
      core::variable_list out(edges);
      if (!grads[0].defined()) return out;
      const Tensor x = take(0), weight = take(1), t = take(2);
      if (!core::has_memory(weight)) core::detail::refuse_memory(kBackward, "weight", weight);
      Tensors a, b;
      bool wants_a = false, wants_b = false;
      for (size_t j = 0; j < count; ++j) {
        wants_a |= needs(2 + j);
        wants_b |= needs(2 + count + j);
        a.push_back(take(3 + j));
      }
      for (size_t j = 0; j < count; ++j) b.push_back(take(3 + count + j));
      const bool wants_bias = needs(edges - 1);
      const int64_t wanted =
          core::wanted_bits(needs(0), needs(1), wants_bias) | (wants_a ? kWantA : 0) | (wants_b ? kWantB : 0);
      static const auto op = core::find_op<decltype(projections_bwd<Meta>)>("_lora_projections_bwd");
      const std::vector<int64_t> of(count, 0);
      const OptionalTensors weights({std::optional<Tensor>(weight)});
      Tensors found = op.call(grads, x, weights, a, b, t, wanted, scale, of, std::nullopt, Scales());
      auto next = found.begin();
      if (needs(0)) out[0] = *next++;
      if (needs(1)) out[1] = *next++;
      if (wants_bias) out[edges - 1] = *next++;
      for (size_t j = 0; wants_a && j < count; ++j, ++next) {
        if (needs(2 + j)) out[2 + j] = *next;
      }
      for (size_t j = 0; wants_b && j < count; ++j, ++next) {
        if (needs(2 + count + j)) out[2 + count + j] = *next;
      }
      return out;
    }
  };

  static void define_backward(torch::Library& m) {
    core::define(
        m,
        "_lora_projections(Tensor x, Tensor?[] weights, Tensor?[] biases, Tensor[] a, Tensor[] b, float[] scale, int[] "
        "of, Tensor? seeds=None, float[] dropout=[]) -> Tensor[]");
    core::define(
        m,
        "_lora_projections_bwd(Tensor[] grads, Tensor x, Tensor?[] weights, Tensor[] a, Tensor[] b, Tensor t, int "
        "wanted, float[] scale, int[] of, Tensor? seeds=None, float[] dropout=[]) -> Tensor[]");
    core::define(
        m, "_low_rank_input(Tensor x, Tensor[] a, float[] scale, Tensor? seeds=None, float[] dropout=[]) -> Tensor");
    core::define(
        m,
        "_low_rank_input_bwd(Tensor grad, Tensor x, Tensor[] a, int wanted, float[] scale, Tensor? seeds=None, "
        "float[] dropout=[]) -> Tensor[]");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<projections<Device>>(m, "_lora_projections");
    core::implement<projections_bwd<Device>>(m, "_lora_projections_bwd");
    core::implement<low_rank_input<Device>>(m, "_low_rank_input");
    core::implement<low_rank_input_bwd<Device>>(m, "_low_rank_input_bwd");
  }
};

}  // namespace

LIGER_OPERATOR(LoraLinear)

}  // namespace liger::ops::lora_linear
