// fp8_linear(x, weight, bias, recipe) = F.linear of numbers in e4m3: rows of x by rows of the weight, in backward rows of
// dy by columns of the weight, and columns of dy by columns of x. fp8_projections takes several weights as if they were
// stacked, and computes both.
//
// x: (..., n), T rows; weight: (m, n); dy: (..., m). A GEMM takes both operands with the summed dimension last, (M, K)
// and (N, K), and their scales (M, 1) and (N, 1). cuBLAS and CUTLASS compute them through aten::_scaled_mm.
//
// recipe "rows_hp": the weight's gradient is a GEMM of x and dy as they are. Nothing is kept between calls but what
// autograd saves: the weights and their columns' scales, and x or its transposed copy if a weight takes a gradient.

#include "core/cuda.h"
#include "core/operator.h"
#include "core/rows.h"
#include "ops/fp8/quantize.h"
#include "runtime/status.h"

namespace liger::ops::fp8_linear {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using quantize_rows::Columns;
using quantize_rows::Quantized;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kBackward = "fp8_linear backward";
constexpr int64_t kMultiple = 16;  // of sizes, for cuBLAS
constexpr int kFirstCapability = 89;

enum class Recipe { rows, rows_hp };

Recipe recipe_of(const char* op, std::string_view recipe) {
  LIGER_CHECK(recipe == "rows" || recipe == "rows_hp", op, "recipe", "be 'rows' or 'rows_hp'", "'", recipe, "'");
  return recipe == "rows" ? Recipe::rows : Recipe::rows_hp;
}

// ---- GEMMs: (M, K) by (N, K), quantised

struct Operand {
  Tensor q, scale;
};

Operand rows_of(const Quantized& t) { return {t.q.flatten(0, -2), t.scale.view({-1, 1})}; }
Operand columns_of(const Quantized& t) { return {t.q_t, t.scale_t}; }

struct Cpu {
  using Quantizer = quantize_rows::Cpu;

  static void check(const char*, const Tensor&) {}

  static Tensor multiply(
      const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool /*is_over_rows*/) {
    const auto dtype = core::compute_type(like);
    auto widened = [&](const Operand& t) { return t.q.to(dtype) * t.scale.to(dtype); };
    Tensor y = at::mm(widened(a), widened(b).t());
    if (bias.defined()) y.add_(bias.to(dtype));
    return y.to(like.scalar_type());
  }
};

/// With zeros, up to a multiple of kMultiple columns.
Tensor padded(const Tensor& q) {
  const int64_t missing = (kMultiple - q.size(1) % kMultiple) % kMultiple;
  return missing ? at::constant_pad_nd(q.view(at::kByte), {0, missing}).view(q.scalar_type()) : q;
}

struct Cuda {
  using Quantizer = quantize_rows::Cuda;

  static void check(const char* op, const Tensor& x) {
    std::string error;
    const auto* info = runtime::device_info(x.device().index(), error);
    TORCH_CHECK(info, op, ": ", error);
    LIGER_CHECK(
        info->capability >= kFirstCapability, op, "x",
        "be on a GPU with FP8 tensor cores, compute capability 8.9 or newer", info->name, ", ", info->capability / 10,
        ".", info->capability % 10);
  }

  static Tensor multiply(
      const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool is_over_rows) {
    const Tensor left = padded(a.q), right = padded(b.q);
    // Fast accumulation drops bits of long sums, and batches have any number of rows.
    const bool fast = !is_over_rows;
    if (like.scalar_type() == at::kBFloat16) {
      const auto added = bias.defined() ? OptionalTensor(bias) : std::nullopt;
      return at::_scaled_mm(left, right.t(), a.scale, b.scale.t(), added, {}, at::kBFloat16, fast);
    }
    // Scales of rows come with results in bfloat16 alone.
    const Tensor one = at::ones({}, a.scale.options());
    Tensor y = at::_scaled_mm(left, right.t(), one, one, {}, {}, at::kFloat, fast);
    y.mul_(a.scale).mul_(b.scale.t());
    if (bias.defined()) y.add_(bias);
    return y.to(like.scalar_type());
  }
};

struct Meta {
  using Quantizer = quantize_rows::Meta;

  static void check(const char*, const Tensor&) {}
};

template <class Device>
Tensor product(const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool is_over_rows = false) {
  const auto m = a.q.sym_size(0), n = b.q.sym_size(0);
  if constexpr (std::is_same_v<Device, Meta>) {
    return at::empty_symint({m, n}, like.options());
  } else {
    if (m == 0 || n == 0 || a.q.size(1) == 0) {
      const Tensor y = at::zeros({m.expect_int(), n.expect_int()}, like.options());
      return bias.defined() ? y + bias : y;
    }
    return Device::multiply(a, b, bias, like, is_over_rows);
  }
}

/// y with the rows of x. Not a view, so that its memory can be used again.
Tensor in_rows_of(const Tensor& x, const Tensor& y) {
  at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = y.sym_sizes().back();
  return at::_unsafe_view_symint(y, sizes);
}

// ---- Checks

void check_multiple(const char* op, const std::string& name, const c10::SymInt& size) {
  LIGER_CHECK(size % kMultiple == 0, op, name, c10::str("be a multiple of ", kMultiple), size);
}

void check_parameter(const char* op, const std::string& name, const Tensor& t, const Tensor& x) {
  core::check_dense(op, name.c_str(), t);
  core::check_same_device(op, name.c_str(), t, "x", x);
  LIGER_CHECK(
      t.scalar_type() == x.scalar_type(), op, name, c10::str("have the dtype of x, ", x.scalar_type()),
      t.scalar_type());
}

void check_weight(const char* op, const std::string& name, const Tensor& weight, const Tensor& x) {
  check_parameter(op, name, weight, x);
  LIGER_CHECK(weight.dim() == 2, op, name, "have two dimensions", weight.sym_sizes());
  const auto n = x.sym_sizes().back();
  LIGER_CHECK(
      weight.sym_size(1) == n, op, name, c10::str("have shape [features, ", n, "], the last dimension of x"),
      weight.sym_sizes());
  check_multiple(op, "features of " + name, weight.sym_size(0));
}

void check_bias(const char* op, const std::string& name, const Tensor& bias, const c10::SymInt& m, const Tensor& x) {
  check_parameter(op, name, bias, x);
  LIGER_CHECK(
      bias.dim() == 1 && bias.sym_size(0) == m, op, name, c10::str("have shape [", m, "], one value per feature"),
      bias.sym_sizes());
}

void check_x(const char* op, const Tensor& x) {
  core::check_activation(op, "x", x);
  check_multiple(op, "features of x", x.sym_sizes().back());
}

void check_lists(const char* op, const Tensor& x, TensorList weights, TensorList biases) {
  check_x(op, x);
  LIGER_CHECK(!weights.empty(), op, "weights", "have an entry", 0);
  LIGER_CHECK(
      biases.empty() || biases.size() == weights.size(), op, "biases",
      c10::str("be empty or have as many entries as weights, ", weights.size()), biases.size());
  for (size_t i = 0; i < weights.size(); ++i) check_weight(op, c10::str("weights[", i, "]"), weights[i], x);
  for (size_t i = 0; i < biases.size(); ++i) {
    check_bias(op, c10::str("biases[", i, "]"), biases[i], weights[i].sym_size(0), x);
  }
}

Tensor stacked(TensorList biases) {
  if (biases.empty()) return {};
  return biases.size() == 1 ? biases[0] : at::cat(biases);
}

// ---- The operators

struct Fp8Projections
    : core::Operator<Fp8Projections, Tensor(const Tensor&, TensorList, TensorList, c10::string_view)> {
  static constexpr const char* kOp = "fp8_projections";
  static constexpr const char* kSchema = schemas::fp8_projections;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = fp8_linear::Cpu;
  using Cuda = fp8_linear::Cuda;
  using Meta = fp8_linear::Meta;

  /// y; with the recipe "rows" what the weights' gradients need of x, if one is wanted; the scales of the weights' columns,
  /// for that of x.
  template <class Device>
  static Four compute(
      const char* op, const Tensor& x, TensorList weights, TensorList biases, bool wants_x, bool wants_weights,
      Recipe recipe) {
    Device::check(op, x);
    const Columns transposed = recipe == Recipe::rows && wants_weights ? Columns::all : Columns::none;
    c10::DeviceGuard guard(x.device());
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor rows = core::as_matrix(x);
    using Quantizer = typename Device::Quantizer;
    Quantized of_x = Quantizer::quantize(op, {rows}, true, transposed);
    const auto of_weights = Quantizer::quantize(op, weights, true, wants_x ? Columns::scales : Columns::none);
    const Tensor y = product<Device>(rows_of(of_x), rows_of(of_weights), stacked(biases), x);
    auto present = [&](const Tensor& t) { return t.defined() ? t : at::empty({0}, of_x.scale.options()); };
    return {in_rows_of(x, y), present(of_x.q_t), present(of_x.scale_t), present(of_weights.scale_t)};
  }

  template <class Device>
  static Four fwd(
      const Tensor& x, TensorList weights, TensorList biases, bool wants_x, bool wants_weights,
      std::string_view recipe) {
    check_lists(kOp, x, weights, biases);
    return compute<Device>(kOp, x, weights, biases, wants_x, wants_weights, recipe_of(kOp, recipe));
  }

  template <class Device>
  static Tensor run(bool, const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
    return std::get<0>(fwd<Device>(x, weights, biases, false, false, recipe));
  }

  /// Those gradients of x, the weights and the biases that are wanted, in this order. x: with the recipe "rows_hp" alone.
  /// weights, weight_scale: for the gradient of x alone. features: of each weight. wanted: of x, each weight, and each bias if there is one.
  template <class Device>
  static std::vector<Tensor> bwd(
      const Tensor& dy, const OptionalTensor& x, TensorList weights, const OptionalTensor& x_t,
      const OptionalTensor& scale_t, const OptionalTensor& weight_scale, c10::SymIntArrayRef features,
      const c10::List<bool>& wanted, std::string_view recipe) {
    Device::check(kBackward, dy);
    c10::DeviceGuard guard(dy.device());
    const size_t count = features.size();
    bool of_weights = false;
    for (size_t i = 0; i < count; ++i) of_weights |= wanted[1 + i];
    const bool of_x = wanted[0], transposed = recipe_of(kBackward, recipe) == Recipe::rows && of_weights;
    using Quantizer = typename Device::Quantizer;
    const Tensor rows = core::as_matrix(dy);
    std::vector<Tensor> out;
    Quantized of_dy;
    if (of_x || transposed)
      of_dy = Quantizer::quantize(kBackward, {rows}, of_x, transposed ? Columns::all : Columns::none);
    if (of_x) {
      const Quantized columns = Quantizer::with_scales(kBackward, weights, *weight_scale);
      out.push_back(in_rows_of(dy, product<Device>(rows_of(of_dy), columns_of(columns), {}, dy)));
    }
    c10::SymInt first = 0;
    for (size_t i = 0; i < count; first = first + features[i++]) {
      if (!wanted[1 + i]) continue;
      if (transposed) {
        const Operand part{
            of_dy.q_t.narrow_symint(0, first, features[i]), of_dy.scale_t.narrow_symint(0, first, features[i])};
        out.push_back(product<Device>(part, {*x_t, *scale_t}, {}, dy, true));
      } else {
        out.push_back(at::mm(rows.narrow_symint(1, first, features[i]).t(), core::as_matrix(*x)));
      }
    }
    first = 0;
    const size_t biases = wanted.size() - 1 - count;
    for (size_t i = 0; i < biases; first = first + features[i++]) {
      if (wanted[1 + count + i]) out.push_back(rows.narrow_symint(1, first, features[i]).sum(0));
    }
    return out;
  }

  static void define_backward(torch::Library& m) {
    core::define(
        m,
        "_fp8_projections_fwd(Tensor x, Tensor[] weights, Tensor[] biases, bool wants_x, bool wants_weights, str "
        "recipe) -> (Tensor, Tensor, Tensor, Tensor)");
    core::define(
        m,
        "_fp8_projections_bwd(Tensor dy, Tensor? x, Tensor[] weights, Tensor? x_t, Tensor? scale_t, Tensor? "
        "weight_scale, "
        "SymInt[] features, bool[] wanted, str recipe) -> Tensor[]");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<fwd<Device>>(m, "_fp8_projections_fwd");
    core::implement<bwd<Device>>(m, "_fp8_projections_bwd");
  }

  /// Saves for the weights' gradients x, or its transposed copy and scales, and for that of x the scales of the weights'
  /// columns and the weights.
  struct Node : core::BackwardNode<Node, core::kAnyNumber> {
    // The operator, recipe, features, and the number of biases.
    std::tuple<std::string, std::string, std::vector<c10::SymInt>, int64_t> options;

    auto state() { return std::tie(options); }
    std::string name() const override { return std::get<0>(options); }

    core::variable_list backward(core::variable_list&& grads) override {
      const auto& [op, recipe, features, biases] = options;
      core::variable_list out(1 + features.size() + biases);
      if (!grads[0].defined()) return out;
      c10::List<bool> wanted;
      for (size_t i = 0; i < out.size(); ++i) wanted.push_back(needs(i));
      std::vector<OptionalTensor> given;
      for (size_t i = 0; i < 4; ++i) {
        const Tensor t = take(i);
        given.push_back(t.defined() ? OptionalTensor(t) : std::nullopt);
      }
      std::vector<Tensor> weights;
      for (size_t i = 0; needs(0) && i < features.size(); ++i) {
        weights.push_back(take(4 + i));
        if (!core::has_memory(weights[i])) core::detail::refuse_memory(kBackward, "weight", weights[i]);
      }
      static const auto handle = core::find_op<decltype(bwd<Meta>)>("_fp8_projections_bwd");
      auto found = handle.call(grads[0], given[0], weights, given[1], given[2], given[3], features, wanted, recipe);
      auto next = found.begin();
      for (size_t i = 0; i < out.size(); ++i) {
        if (needs(i)) out[i] = std::move(*next++);
      }
      return out;
    }
  };

  /// Connects the results of _fp8_projections_fwd, which is called with checked arguments.
  static Tensor record(
      const char* op, const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
    using torch::autograd::compute_requires_grad;
    const bool of_x = compute_requires_grad(x), of_weights = compute_requires_grad(weights);
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto handle = core::find_op<decltype(fwd<Meta>)>("_fp8_projections_fwd");
    auto [y, x_t, scale_t, weight_scale] = handle.call(x, weights, biases, of_x, of_weights, recipe);
    auto node = core::make_node<Node>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weights, biases));
    auto kept = [](bool needed, const Tensor& t) { return needed ? t : Tensor(); };
    const bool rows = recipe == "rows";
    node->save_all(
        {kept(of_weights && !rows, x), kept(of_weights && rows, x_t), kept(of_weights && rows, scale_t),
         kept(of_x, weight_scale)});
    if (of_x) node->save_all(weights);
    std::vector<c10::SymInt> features;
    for (const Tensor& weight : weights) features.push_back(weight.sym_size(0));
    node->options = {op, std::string(recipe), std::move(features), int64_t(biases.size())};
    node->connect(y);
    return y;
  }

  static Tensor autograd(const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
    core::check_dense(kOp, "x", x);
    for (const Tensor& weight : weights) core::check_dense(kOp, "weights", weight);
    for (const Tensor& bias : biases) core::check_dense(kOp, "biases", bias);
    core::check_no_forward_ad(kOp, x, weights, biases);
    if (torch::autograd::compute_requires_grad(x, weights, biases)) return record(kOp, x, weights, biases, recipe);
    at::AutoDispatchBelowADInplaceOrView below;
    return handle().call(x, weights, biases, recipe);
  }

  static void implement_autograd(torch::Library& m) { m.impl(kOp, autograd); }
};

struct Fp8Linear
    : core::Operator<Fp8Linear, Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view)> {
  static constexpr const char* kOp = "fp8_linear";
  static constexpr const char* kSchema = schemas::fp8_linear;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = fp8_linear::Cpu;
  using Cuda = fp8_linear::Cuda;
  using Meta = fp8_linear::Meta;

  static TensorList list(const OptionalTensor& bias) {
    return bias && bias->defined() ? TensorList(*bias) : TensorList();
  }

  static void check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    auto needs_memory = [](const char* name, const Tensor& t) {
      if (t.defined() && !core::has_memory(t)) core::detail::refuse_memory(kOp, name, t);
    };
    needs_memory("x", x), needs_memory("weight", weight), needs_memory("bias", core::value_or_undefined(bias));
    check_x(kOp, x);
    check_weight(kOp, "weight", weight, x);
    for (const Tensor& t : list(bias)) check_bias(kOp, "bias", t, weight.sym_size(0), x);
  }

  template <class Device>
  static Tensor run(bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    check(x, weight, bias);
    return std::get<0>(
        Fp8Projections::compute<Device>(kOp, x, weight, list(bias), false, false, recipe_of(kOp, recipe)));
  }

  static Tensor autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    core::check_dense(kOp, "x", x);
    core::check_dense(kOp, "weight", weight);
    core::check_dense(kOp, "bias", bias);
    core::check_no_forward_ad(kOp, x, weight, bias);
    if (torch::autograd::compute_requires_grad(x, weight, bias)) {
      check(x, weight, bias);
      recipe_of(kOp, recipe);
      return Fp8Projections::record(kOp, x, weight, list(bias), recipe);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return handle().call(x, weight, bias, recipe);
  }

  static void implement_autograd(torch::Library& m) { m.impl(kOp, autograd); }
};

}  // namespace

LIGER_OPERATOR(Fp8Projections)
LIGER_OPERATOR(Fp8Linear)

}  // namespace liger::ops::fp8_linear
