// lora_linear(x, weight, a, b, scale, bias) = F.linear(x, weight, bias) + sum_j scale_j (x A_j^T) B_j^T, and several
// such projections of one x.
//
// Shapes: x (T, n), W (m, n), A (r, n), B (m, r); t = x A^T and u = scale dy B are (T, r). R: the ranks of a group
// together.
//
// lora_linear_forms.h computes them.

#include "ops/linear/lora_linear_forms.h"

#include <numeric>

#include "core/operator.h"

namespace liger::ops::lora_linear {
namespace {

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

/// A or B.
void check_adapter(const char* op, const std::string& name, const Tensor& t, const Tensor& x) {
  check_matrix(op, name, t, x);
  core::check_parameter_dtype(op, name.c_str(), t, "x", x);
}

void check_a(const char* op, const std::string& name, const Tensor& a, const Tensor& x) {
  check_adapter(op, name, a, x);
  LIGER_CHECK(
      a.sym_size(1) == x.sym_sizes().back(), op, name,
      c10::str("have shape [rank, ", x.sym_sizes().back(), "], the last dimension of x"), a.sym_sizes());
}

void check_as_many(const char* op, const char* name, size_t size, const Group& g) {
  LIGER_CHECK(size == g.a.size(), op, name, c10::str("have as many entries as a, ", g.a.size()), size);
}

/// The lists, so that none is read beyond its end.
void check_lists(const char* op, const Group& g) {
  check_as_many(op, "b", g.b.size(), g);
  check_as_many(op, "scale", g.scale.size(), g);
  check_as_many(op, "of", g.of.size(), g);
  const int64_t projections = g.weights.size();
  for (const int64_t i : g.of) {
    LIGER_CHECK(i >= 0 && i < projections, op, "of", c10::str("lie in [0, ", projections, "), the weights"), i);
  }
}

void check_adapters(const char* op, const Tensor& x, const Group& g, const OptionalTensors& biases) {
  const size_t count = g.a.size();
  check_lists(op, g);
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
  check_as_many(op, "dropout", g.dropout.size(), g);
  for (const double rate : g.dropout) LIGER_CHECK(rate >= 0 && rate <= 1, op, "dropout", "be between 0 and 1", rate);
  LIGER_CHECK(g.seeds.defined(), op, "seeds", "be given with dropout", "None");
  core::check_same_device(op, "seeds", g.seeds, "x", x);
  LIGER_CHECK(g.seeds.scalar_type() == at::kLong, op, "seeds", "be int64", g.seeds.scalar_type());
  LIGER_CHECK(
      g.seeds.dim() == 1 && g.seeds.sym_size(0) == count, op, "seeds", c10::str("have as many entries as a, ", count),
      g.seeds.sym_sizes());
}

// ---- Several projections of one x, for liger_ops/linear/adapters.py

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

/// The gradients of x, weights, biases, a and b, of those that are wanted. A weight that is None has no gradient, and
/// dx lacks that of its layer.
struct ProjectionsBackward
    : core::Private<
          ProjectionsBackward,
          Tensors(
              TensorList, const Tensor&, const OptionalTensors&, TensorList, TensorList, const Tensor&, int64_t, Scales,
              at::IntArrayRef, const std::optional<Tensor>&, Scales)> {
  static constexpr const char* kName = "_lora_projections_bwd";
  static constexpr const char* kArguments = "grads, x, weights, a, b, t, wanted, scale, of, seeds=None, dropout=[]";

  template <class Device>
  static Tensors run(
      TensorList grads, const Tensor& x, const OptionalTensors& weights, TensorList a, TensorList b, const Tensor& t,
      int64_t wanted, Scales scale, at::IntArrayRef of, const std::optional<Tensor>& seeds, Scales dropout) {
    const Tensors present = tensors_of(weights);
    const Group g{present, a, b, scale, of, seeds.value_or(Tensor()), dropout};
    LIGER_CHECK(
        grads.size() == weights.size(), kBackward, "grads", c10::str("have ", weights.size(), " entries"),
        grads.size());
    check_lists(kBackward, g);
    check_dropout(kBackward, x, g);
    const Entry<Device> entry(x);
    Gradients out = gradients<Device>(matrices(grads), core::as_matrix(x), core::as_matrix(t).contiguous(), g, wanted);
    if (out.x.defined()) out.x = in_rows_of(x, out.x);
    return out.all();
  }
};

/// Puts gradients to where a node returns them. places: for each gradient of `wanted`, the edges of its tensors.
struct GradientPlaces {
  std::vector<std::vector<size_t>> places;

  template <class Node>
  int64_t wanted(const Node& node) const {
    int64_t out = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      for (const size_t edge : places[i]) out |= int64_t(node.needs(edge)) << i;
    }
    return out;
  }

  template <class Node>
  void place(const Node& node, const Tensors& found, core::variable_list& out) const {
    auto next = found.begin();
    for (size_t i = 0; i < places.size(); ++i) {
      if (!core::wants(wanted(node), i)) continue;
      for (const size_t edge : places[i]) {
        if (node.needs(edge)) out[edge] = *next;
        ++next;
      }
    }
  }
};

std::vector<size_t> range(size_t first, size_t count) {
  std::vector<size_t> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

/// Of x, weights, biases, a and b. Saves x, t, seeds, weights, a, b.
struct ProjectionsNode : core::BackwardNode<ProjectionsNode, core::kAnyNumber> {
  std::vector<double> scale, dropout;
  std::vector<int64_t> of;
  int64_t projections = 0;

  auto state() { return std::tie(scale, dropout, of, projections); }
  std::string name() const override { return kOp; }

  void keep(const Tensor& x, const Tensor& t, const Group& g) {
    save_all({x, t, g.seeds});
    for (const TensorList list : {g.weights, g.a, g.b}) save_all(list);
    scale = g.scale.vec(), dropout = g.dropout.vec(), of = g.of.vec(), projections = g.weights.size();
  }

  core::variable_list backward(core::variable_list&& grads) override {
    const size_t count = scale.size(), n = projections;
    core::variable_list out(1 + 2 * n + 2 * count);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); })) return out;
    const Tensor x = take(0), t = take(1), seeds = take(2);
    Tensors weights, adapters;
    for (size_t i = 0; i < n; ++i) weights.push_back(take(3 + i));
    for (size_t i = 0; i < 2 * count; ++i) adapters.push_back(take(3 + n + i));
    const TensorList a = TensorList(adapters).slice(0, count), b = TensorList(adapters).slice(count);
    OptionalTensors present;
    GradientPlaces edges{{{0}, {}, {}, range(1 + 2 * n, count), range(1 + 2 * n + count, count)}};
    for (size_t i = 0; i < n; ++i) {
      const Tensor& weight = weights[i];
      if (!core::has_memory(weight)) core::refuse_memory(kBackward, "weight", weight);
      present.push_back(weight.defined() ? std::optional(weight) : std::nullopt);
      if (weight.defined()) {
        edges.places[kWeights].push_back(1 + i);
        edges.places[kBiases].push_back(1 + n + i);
      } else if (needs(1 + n + i)) {
        out[1 + n + i] = grads[i];
      }
      if (grads[i].defined()) continue;
      at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
      // Of a layer without a weight, adapters tell the number: its result is not saved, and `present` has none.
      sizes.back() = features_of({weights, a, b, scale, of, {}, {}}, present, i);
      grads[i] = at::zeros_symint(sizes, x.options());
    }
    const int64_t wanted = edges.wanted(*this);
    edges.place(*this, ProjectionsBackward::call(grads, x, present, a, b, t, wanted, scale, of, seeds, dropout), out);
    return out;
  }
};

/// Where a weight is None, `biases` may have the result of another layer, (..., m). The last result is t.
struct LoraProjections : core::Operator<
                             LoraProjections,
                             Tensors(
                                 const Tensor&, const OptionalTensors&, const OptionalTensors&, TensorList, TensorList,
                                 Scales, at::IntArrayRef, const std::optional<Tensor>&, Scales)> {
  static constexpr const char* kOp = "_lora_projections";
  static constexpr const char* kArguments = "x, weights, biases, a, b, scale, of, seeds=None, dropout=[]";
  using Edges = core::Positions<0, 1, 2, 3, 4>;
  using Privates = core::Privates<ProjectionsBackward>;
  using Cpu = lora_linear::Cpu;
  using Cuda = lora_linear::Cuda;
  using Meta = lora_linear::Meta;

  template <class Device>
  static Tensors run(
      bool, const Tensor& x, const OptionalTensors& weights, const OptionalTensors& biases, TensorList a, TensorList b,
      Scales scale, at::IntArrayRef of, const std::optional<Tensor>& seeds, Scales dropout) {
    core::check_activation(lora_linear::kOp, "x", x);
    LIGER_CHECK(
        biases.size() == weights.size(), lora_linear::kOp, "biases", c10::str("have ", weights.size(), " entries"),
        biases.size());
    const Tensors present = tensors_of(weights);
    const Group g{present, a, b, scale, of, seeds.value_or(Tensor()), dropout};
    OptionalTensors summands = biases.copy();
    for (size_t i = 0; i < weights.size(); ++i) {
      const std::optional<Tensor> bias = biases.get(i);
      check_projection(lora_linear::kOp, x, present[i], bias);
      if (!present[i].defined() && bias && bias->defined()) summands.set(i, core::as_matrix(*bias));
    }
    check_adapters(lora_linear::kOp, x, g, biases);
    check_dropout(lora_linear::kOp, x, g);
    const Entry<Device> entry(x);
    auto [ys, t] = project<Device>(core::as_matrix(x), summands, g);
    ys.push_back(std::move(t));
    for (Tensor& y : ys) y = in_rows_of(x, y);
    return std::move(ys);
  }

  struct Node : ProjectionsNode {
    void record(
        const Tensors& out, const Tensor& x, const OptionalTensors& weights, const OptionalTensors&, TensorList a,
        TensorList b, Scales scale, at::IntArrayRef of, const std::optional<Tensor>& seeds, Scales dropout) {
      const Tensors present = tensors_of(weights);
      keep(x, out.back(), {present, a, b, scale, of, seeds.value_or(Tensor()), dropout});
      for (size_t i = 0; i < present.size(); ++i) connect(out[i]);
    }
  };
};

// ---- The low-rank input of a head, for liger_ops/linear/adapters.py

/// The gradients of x and a, of those that are wanted.
struct LowRankInputBackward
    : core::Private<
          LowRankInputBackward,
          Tensors(const Tensor&, const Tensor&, TensorList, int64_t, Scales, const std::optional<Tensor>&, Scales)> {
  static constexpr const char* kName = "_low_rank_input_bwd";
  static constexpr const char* kArguments = "grad, x, a, wanted, scale, seeds=None, dropout=[]";

  template <class Device>
  static Tensors run(
      const Tensor& grad, const Tensor& x, TensorList a, int64_t wanted, Scales scale,
      const std::optional<Tensor>& seeds, Scales dropout) {
    const Group g{{}, a, {}, scale, {}, seeds.value_or(Tensor()), dropout};
    check_as_many(kBackward, "scale", scale.size(), g);
    check_dropout(kBackward, x, g);
    const Entry<Device> entry(x);
    Gradients out;
    if constexpr (std::is_same_v<Device, Meta>) {
      if (core::wants(wanted, kX)) out.x = at::empty_like(x, at::MemoryFormat::Contiguous);
      for (const Tensor& each : a) {
        if (core::wants(wanted, kA)) out.a.push_back(at::empty_like(each, at::MemoryFormat::Contiguous));
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
        if (core::wants(wanted, kA)) {
          out.a.push_back(at::mm(u.t(), dropped_rows(rows, g, j, dtype)).to(a[j].scalar_type()));
        }
        if (!core::wants(wanted, kX)) continue;
        const Tensor dx = dropped_rows(at::mm(u, a[j].to(dtype)), g, j, dtype);
        sum = sum.defined() ? sum.add_(dx) : dx;
      }
      if (sum.defined()) out.x = sum.to(x.scalar_type());
    }
    if (out.x.defined()) out.x = in_rows_of(x, out.x);
    return out.all();
  }
};

/// scale_j * drop(x) A_j^T of all adapters side by side, (..., R) in fp32, or in fp64 for fp64.
struct LowRankInput
    : core::Operator<LowRankInput, Tensor(const Tensor&, TensorList, Scales, const std::optional<Tensor>&, Scales)> {
  static constexpr const char* kOp = "_low_rank_input";
  static constexpr const char* kArguments = "x, a, scale, seeds=None, dropout=[]";
  using Edges = core::Positions<0, 1>;
  using Privates = core::Privates<LowRankInputBackward>;
  using Cpu = lora_linear::Cpu;
  using Cuda = lora_linear::Cuda;
  using Meta = lora_linear::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& x, TensorList a, Scales scale, const std::optional<Tensor>& seeds, Scales dropout) {
    const Group g{{}, a, {}, scale, {}, seeds.value_or(Tensor()), dropout};
    core::check_activation(lora_linear::kOp, "x", x);
    LIGER_CHECK(!a.empty(), lora_linear::kOp, "a", "have an entry", 0);
    check_as_many(lora_linear::kOp, "scale", scale.size(), g);
    for (size_t j = 0; j < a.size(); ++j) check_a(lora_linear::kOp, c10::str("a[", j, "]"), a[j], x);
    check_dropout(lora_linear::kOp, x, g);
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

  /// Saves x, seeds, a.
  struct Node : core::BackwardNode<Node, core::kAnyNumber> {
    std::tuple<std::vector<double>, std::vector<double>> options;  // scale, dropout

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    void record(
        const Tensor& out, const Tensor& x, TensorList a, const Scales&, const std::optional<Tensor>& seeds,
        const Scales&) {
      save_all({x, seeds.value_or(Tensor())});
      save_all(a);
      connect(out);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      const auto& [scale, dropout] = options;
      const size_t count = scale.size();
      core::variable_list out(1 + count);
      if (!grads[0].defined()) return out;
      const Tensor x = take(0), seeds = take(1);
      Tensors a;
      for (size_t j = 0; j < count; ++j) a.push_back(take(2 + j));
      const GradientPlaces edges{{{0}, {}, {}, range(1, count)}};
      const int64_t wanted = edges.wanted(*this);
      edges.place(*this, LowRankInputBackward::call(grads[0], x, a, wanted, scale, seeds, dropout), out);
      return out;
    }
  };
};

// ---- The operator

struct LoraLinear
    : core::Operator<
          LoraLinear,
          Tensor(const Tensor&, const Tensor&, TensorList, TensorList, Scales, const std::optional<Tensor>&)> {
  static constexpr const char* kOp = lora_linear::kOp;
  static constexpr const char* kSchema = schemas::lora_linear;
  using Edges = core::Positions<0, 1, 5, 2, 3>;
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

  struct Node : ProjectionsNode {
    void record(
        const Forward& out, const Tensor& x, const Tensor& weight, TensorList a, TensorList b, Scales scale,
        const std::optional<Tensor>&) {
      const auto& [y, t] = out;
      const std::vector<int64_t> of(a.size(), 0);
      keep(x, t, {weight, a, b, scale, of, {}, {}});
      connect(y);
    }
  };
};

}  // namespace

LIGER_OPERATOR(LoraProjections)
LIGER_OPERATOR(LowRankInput)
LIGER_OPERATOR(LoraLinear)

}  // namespace liger::ops::lora_linear
