// rms_norm_gated(x, gate, weight, eps, offset, casting_mode, activation, *, gate_first, group_size)
//     = rms_norm(x) * (weight + offset) * act(gate), or rms_norm(x * act(gate)) * (weight + offset) if gate_first
//
// x, gate: (..., n) of any strides, of one dtype; weight: (n,) in x's dtype or fp32. act: silu or sigmoid. Statistics
// are fp32, of every group of group_size columns.
//
// Arithmetic is fp32. "gemma" and "none" round the result alone. "llama" also rounds the normalised row, and its
// product with a weight of x's dtype ahead of the gate. With gate_first, a fp32 weight makes the result of "llama"
// fp32.
//
// Backward reads x and the gate again and recomputes the activation: forward saves one number per group besides inputs.

#include "ops/norms/rms_norm_gated.h"

#include "core/operator.h"

namespace liger::ops::rms_norm_gated {

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

Forward allocate(
    const Tensor& x, const Tensor& weight, const Options& options, const c10::SymInt& groups,
    const c10::SymInt& columns, bool save_rstd) {
  Forward out;
  const bool unit = x.sym_strides().back() == 1;
  const auto dtype = x.options().dtype(options.result_type(x, weight));
  out.y = at::empty_like(x, unit ? dtype : dtype.memory_format(at::MemoryFormat::Contiguous));
  if (save_rstd) out.rstd = core::empty_per_row(by_group(out.y, groups, columns), core::compute_type(x));
  return out;
}

Forward Meta::forward(
    const Tensor& x, const Tensor&, const Tensor& weight, const Options& options, const c10::SymInt& groups,
    const c10::SymInt& columns, bool save_rstd) {
  return allocate(x, weight, options, groups, columns, save_rstd);
}

Gradients Meta::backward(
    const Tensor&, const Tensor&, const Tensor&, const Tensor& weight, const Tensor&, const Options&, const Tensor& dx,
    const Tensor& dgate, bool needs_dweight) {
  return {dx, dgate, needs_dweight ? at::empty_like(weight) : Tensor()};
}

namespace {

/// A bit of `wanted`, besides kWantInput and kWantWeight.
constexpr int64_t kWantGate = 4;

Options options_of(
    const char* op, double eps, double offset, c10::string_view mode, c10::string_view activation, bool gate_first) {
  core::check_eps(op, eps);
  core::check_casting_mode(op, mode);
  LIGER_CHECK(
      activation == "silu" || activation == "sigmoid", op, "activation", "be 'silu' or 'sigmoid'", "'", activation,
      "'");
  return {eps, offset, core::rounds_first(mode), activation == "sigmoid", gate_first};
}

void check(const char* op, const Tensor& x, const Tensor& gate, const Tensor& weight) {
  core::check_rows(op, "x", x);
  core::check_same(op, "gate", gate, "x", x);
  if (weight.defined()) core::check_column_parameter(op, "weight", weight, x);
}

struct RmsNormGated : core::Operator<
                          RmsNormGated,
                          Tensor(
                              const Tensor&, const Tensor&, const OptionalTensor&, double, double, c10::string_view,
                              c10::string_view, bool, std::optional<int64_t>)> {
  static constexpr const char* kOp = rms_norm_gated::kOp;
  static constexpr const char* kSchema = schemas::rms_norm_gated;
  using Edges = core::Positions<0, 1, 2>;
  using Forward = std::tuple<Tensor, Tensor>;  // y, rstd
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Result<1>>;
  using Cpu = rms_norm_gated::Cpu;
  using Cuda = rms_norm_gated::Cuda;
  using Meta = rms_norm_gated::Meta;

  template <class Device>
  static Forward run(
      bool save, const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps, double offset,
      c10::string_view mode, c10::string_view activation, bool gate_first, std::optional<int64_t> group_size) {
    const Tensor w = value_or_undefined(weight);
    check(kOp, x, gate, w);
    const auto options = options_of(kOp, eps, offset, mode, activation, gate_first);
    const auto n = x.sym_sizes().back();
    c10::SymInt groups = 1, columns = n;
    if (group_size) {
      LIGER_CHECK(
          *group_size > 0 && n % *group_size == 0, kOp, "group_size", c10::str("divide the number of columns, ", n),
          *group_size);
      groups = n / *group_size, columns = *group_size;
    }
    auto out = Device::forward(x, gate, w, options, groups, columns, save);
    return {out.y, out.rstd};
  }

  // PyTorch computes the formula in the wider dtype of x and gate, with autocast and without.
  struct Autocast {
    static constexpr bool kCpu = true, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      auto& x = std::get<0>(arguments);
      auto& gate = std::get<1>(arguments);
      auto& weight = std::get<2>(arguments);
      const auto wider = at::promote_types(x.scalar_type(), gate.scalar_type());
      if (weight && weight->defined() && weight->scalar_type() != at::kFloat) weight = weight->to(wider);
      x = x.to(wider), gate = gate.to(wider);
    }
  };

  // ---- Backward

  template <class Device>
  static Gradients differentiate(
      const Tensor& dy, const Tensor& dx, const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
      const Tensor& rstd, int64_t wanted, double offset, c10::string_view mode, c10::string_view activation,
      bool gate_first) {
    const Tensor w = value_or_undefined(weight);
    check(kBackward, x, gate, w);
    const auto options = options_of(kBackward, 0, offset, mode, activation, gate_first);
    const auto dtype = options.result_type(x, w);
    LIGER_CHECK(
        dy.scalar_type() == dtype, kBackward, "dy", c10::str("have the dtype of the result, ", dtype),
        dy.scalar_type());
    LIGER_CHECK(
        dy.sym_sizes().equals(x.sym_sizes()), kBackward, "dy", c10::str("have the shape of x, ", x.sym_sizes()),
        dy.sym_sizes());
    // Like dx, and not like the gate: kernels walk both by the same rows.
    const Tensor dgate = wanted & kWantGate ? core::empty_rows_like(x) : Tensor();
    return Device::backward(dy, x, gate, w, rstd, options, dx, dgate, wanted & core::kWantWeight);
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> bwd(
      const Tensor& dy, const Tensor& x, const Tensor& gate, const OptionalTensor& weight, const Tensor& rstd,
      int64_t wanted, double offset, c10::string_view mode, c10::string_view activation, bool gate_first) {
    const Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
    auto out = differentiate<Device>(dy, dx, x, gate, weight, rstd, wanted, offset, mode, activation, gate_first);
    return {out.dx, out.dgate, out.dweight};
  }

  /// Overwrites dy with dx.
  template <class Device>
  static std::tuple<Tensor, Tensor> bwd_(
      Tensor& dy, const Tensor& x, const Tensor& gate, const OptionalTensor& weight, const Tensor& rstd, int64_t wanted,
      double offset, c10::string_view mode, c10::string_view activation, bool gate_first) {
    auto out = differentiate<Device>(dy, dy, x, gate, weight, rstd, wanted, offset, mode, activation, gate_first);
    return {out.dgate, out.dweight};
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_rms_norm_gated_bwd",
        "Tensor(a!) dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, int wanted, float offset, "
        "str casting_mode, str activation, bool gate_first",
        "(Tensor, Tensor, Tensor)", "(Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_rms_norm_gated_bwd");
    core::implement<bwd_<Device>>(m, "_rms_norm_gated_bwd_");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), gate = node.take(1), weight = node.take(2), rstd = node.take(3);
    const auto& [eps, offset, mode, activation, gate_first, group_size] = node.options;
    const int64_t wanted = core::wanted_bits(node.needs(0), node.needs(2)) | (node.needs(1) ? kWantGate : 0);
    if (node.needs(0) && node.may_overwrite(dy, x)) {
      static const auto op = core::find_op<decltype(bwd_<Meta>)>("_rms_norm_gated_bwd_");
      auto [dgate, dweight] = op.call(dy, x, gate, weight, rstd, wanted, offset, mode, activation, gate_first);
      return {dy, dgate, dweight};
    }
    static const auto op = core::find_op<decltype(bwd<Meta>)>("_rms_norm_gated_bwd");
    auto [dx, dgate, dweight] = op.call(dy, x, gate, weight, rstd, wanted, offset, mode, activation, gate_first);
    return {dx, dgate, dweight};
  }
};

}  // namespace

LIGER_OPERATOR(RmsNormGated)

}  // namespace liger::ops::rms_norm_gated
