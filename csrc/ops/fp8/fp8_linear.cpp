// fp8_linear(x, weight, bias, recipe) = F.linear of numbers in e4m3: rows of x by rows of the weight, in backward rows of
// dy by columns of the weight, and columns of dy by columns of x.
//
// x: (..., n), T rows; weight: (m, n); dy: (..., m). A GEMM takes both operands with the summed dimension last, (M, K)
// and (N, K), and their scales (M, 1) and (N, 1). cuBLAS and CUTLASS compute them through aten::_scaled_mm.
//
// recipe "rows_hp": the weight's gradient is a GEMM of x and dy as they are. Nothing is kept between calls but what
// autograd saves: the weight, and x or its transposed copy if the weight takes a gradient.

#include "core/cuda.h"
#include "core/operator.h"
#include "core/rows.h"
#include "ops/fp8/quantize.h"
#include "runtime/status.h"

namespace liger::ops::fp8_linear {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using quantize_rows::Quantized;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kOp = "fp8_linear";
constexpr const char* kBackward = "fp8_linear backward";
constexpr int64_t kMultiple = 16;  // of sizes, for cuBLAS
constexpr int kFirstCapability = 89;

enum class Recipe { rows, rows_hp };

Recipe recipe_of(std::string_view recipe) {
  LIGER_CHECK(recipe == "rows" || recipe == "rows_hp", kOp, "recipe", "be 'rows' or 'rows_hp'", "'", recipe, "'");
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

void check_multiple(const char* op, const char* name, const c10::SymInt& size) {
  LIGER_CHECK(size % kMultiple == 0, op, name, c10::str("be a multiple of ", kMultiple), size);
}

void check_parameter(const char* name, const Tensor& t, const Tensor& x) {
  core::check_dense(kOp, name, t);
  core::check_same_device(kOp, name, t, "x", x);
  LIGER_CHECK(
      t.scalar_type() == x.scalar_type(), kOp, name, c10::str("have the dtype of x, ", x.scalar_type()),
      t.scalar_type());
}

template <class Device>
void check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  core::check_activation(kOp, "x", x);
  check_parameter("weight", weight, x);
  LIGER_CHECK(weight.dim() == 2, kOp, "weight", "have two dimensions", weight.sym_sizes());
  const auto n = x.sym_sizes().back(), m = weight.sym_size(0);
  LIGER_CHECK(
      weight.sym_size(1) == n, kOp, "weight", c10::str("have shape [features, ", n, "], the last dimension of x"),
      weight.sym_sizes());
  check_multiple(kOp, "features of x", n);
  check_multiple(kOp, "features of weight", m);
  if (bias && bias->defined()) {
    check_parameter("bias", *bias, x);
    LIGER_CHECK(
        bias->dim() == 1 && bias->sym_size(0) == m, kOp, "bias",
        c10::str("have shape [", m, "], one value per feature"), bias->sym_sizes());
  }
  Device::check(kOp, x);
}

// ---- The operator

struct Fp8Linear
    : core::Operator<Fp8Linear, Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view)> {
  static constexpr const char* kOp = fp8_linear::kOp;
  static constexpr const char* kSchema = schemas::fp8_linear;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = fp8_linear::Cpu;
  using Cuda = fp8_linear::Cuda;
  using Meta = fp8_linear::Meta;

  /// y, and with the recipe "rows" what the weight's gradient needs of x, if that is wanted.
  template <class Device>
  static Three fwd(
      const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t wanted, std::string_view recipe) {
    check<Device>(x, weight, bias);
    const bool transposed = (wanted & core::kWantWeight) && recipe_of(recipe) == Recipe::rows;
    c10::DeviceGuard guard(x.device());
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor rows = core::as_matrix(x);
    using Quantizer = typename Device::Quantizer;
    Quantized of_x = Quantizer::quantize(kOp, rows, true, transposed);
    const Quantized of_weight = Quantizer::quantize(kOp, weight, true, false);
    const Tensor y = product<Device>(rows_of(of_x), rows_of(of_weight), core::value_or_undefined(bias), x);
    if (!transposed) {
      of_x.q_t = at::empty({0}, of_x.scale.options());
      of_x.scale_t = at::empty({0}, of_x.scale.options());
    }
    return {in_rows_of(x, y), of_x.q_t, of_x.scale_t};
  }

  template <class Device>
  static Tensor run(bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    recipe_of(recipe);
    return std::get<0>(fwd<Device>(x, weight, bias, 0, recipe));
  }

  /// Gradients of x, weight and bias; without elements where they are not wanted. x: with the recipe "rows_hp" alone.
  template <class Device>
  static Three bwd(
      const Tensor& dy, const OptionalTensor& x, const OptionalTensor& weight, const OptionalTensor& x_t,
      const OptionalTensor& scale_t, int64_t wanted, std::string_view recipe) {
    Device::check(kBackward, dy);
    c10::DeviceGuard guard(dy.device());
    const bool of_x = wanted & core::kWantInput, of_weight = wanted & core::kWantWeight;
    const bool transposed = of_weight && recipe_of(recipe) == Recipe::rows;
    using Quantizer = typename Device::Quantizer;
    const Tensor rows = core::as_matrix(dy);
    // Results of an operator must not be one tensor.
    auto none = [&] { return at::empty({0}, dy.options()); };
    Tensor dx = none(), dw = none(), db = none();
    Quantized of_dy;
    if (of_x || transposed) of_dy = Quantizer::quantize(kBackward, rows, of_x, transposed);
    if (of_x) {
      const Quantized columns = Quantizer::quantize(kBackward, *weight, false, true);
      dx = in_rows_of(dy, product<Device>(rows_of(of_dy), columns_of(columns), {}, dy));
    }
    if (transposed) {
      dw = product<Device>(columns_of(of_dy), {*x_t, *scale_t}, {}, dy, true);
    } else if (of_weight) {
      dw = at::mm(rows.t(), core::as_matrix(*x));
    }
    if (wanted & core::kWantBias) db = rows.sum(0);
    return {dx, dw, db};
  }

  static void define_backward(torch::Library& m) {
    core::define(
        m,
        "_fp8_linear_fwd(Tensor x, Tensor weight, Tensor? bias, int wanted, str recipe) -> (Tensor, Tensor, Tensor)");
    core::define(
        m,
        "_fp8_linear_bwd(Tensor dy, Tensor? x, Tensor? weight, Tensor? x_t, Tensor? scale_t, int wanted, str recipe) "
        "-> "
        "(Tensor, Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<fwd<Device>>(m, "_fp8_linear_fwd");
    core::implement<bwd<Device>>(m, "_fp8_linear_bwd");
  }

  /// Saves the weight for the gradient of x, and for that of the weight x, or its transposed copy and scales.
  struct Node : core::BackwardNode<Node, 4> {
    std::tuple<std::string> options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    core::variable_list backward(core::variable_list&& grads) override {
      if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
      const Tensor x = take(0), weight = take(1), x_t = take(2), scale_t = take(3);
      if (weight.defined() && !core::has_memory(weight)) core::detail::refuse_memory(kBackward, "weight", weight);
      const int64_t wanted = core::wanted_bits(needs(0), needs(1), needs(2));
      static const auto op = core::find_op<decltype(bwd<Meta>)>("_fp8_linear_bwd");
      auto given = [](const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
      auto [dx, dw, db] =
          op.call(grads[0], given(x), given(weight), given(x_t), given(scale_t), wanted, std::get<0>(options));
      return {needs(0) ? dx : Tensor(), needs(1) ? dw : Tensor(), needs(2) ? db : Tensor()};
    }
  };

  static Tensor autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    core::check_dense(kOp, "x", x);
    core::check_dense(kOp, "weight", weight);
    core::check_dense(kOp, "bias", bias);
    core::check_no_forward_ad(kOp, x, weight, bias);
    using torch::autograd::compute_requires_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    if (!compute_requires_grad(x, weight, bias)) return handle().call(x, weight, bias, recipe);
    const bool of_x = compute_requires_grad(x), of_weight = compute_requires_grad(weight);
    const bool rows = recipe == "rows";
    static const auto op = core::find_op<decltype(fwd<Meta>)>("_fp8_linear_fwd");
    auto [y, x_t, scale_t] = op.call(x, weight, bias, core::wanted_bits(of_x, of_weight), recipe);
    auto node = core::make_node<Node>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    node->options = {std::string(recipe)};
    auto kept = [](bool needed, const Tensor& t) { return needed ? t : Tensor(); };
    node->save(
        kept(of_weight && !rows, x), kept(of_x, weight), kept(of_weight && rows, x_t),
        kept(of_weight && rows, scale_t));
    node->connect(y);
    return y;
  }

  static void implement_autograd(torch::Library& m) { m.impl(Op::kOp, autograd); }

 private:
  using Op = Fp8Linear;
};

}  // namespace

LIGER_OPERATOR(Fp8Linear)

}  // namespace liger::ops::fp8_linear
