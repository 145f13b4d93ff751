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

using core::value_or_undefined;

namespace {

struct Meta {
  static void forward(const auto&...) {}
  static Gradients backward(
      const Tensor& dx, const Tensor& dgate, const Tensor&, const Tensor&, const Tensor&, const Tensor& weight,
      const Tensor&, const Options&, bool needs_dweight) {
    return {dx, dgate, needs_dweight ? at::empty_like(weight) : Tensor()};
  }
};

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

struct Backward : core::Private<
                      Backward,
                      Gradients(
                          const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, int64_t,
                          double, c10::string_view, c10::string_view, bool),
                      core::Overwrites<0>> {
  static constexpr const char* kName = "_rms_norm_gated_bwd";
  static constexpr const char* kArguments =
      "dy, x, gate, weight, rstd, wanted, offset, casting_mode, activation, gate_first";

  template <class Device>
  static Gradients run(
      const Into& into, const Tensor& dy, const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
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
    const Tensor dx = core::result_rows(into[0], core::wants(wanted, 0), x);
    // Like dx, and not like the gate: kernels walk both by the same rows.
    const Tensor dgate = core::wants(wanted, 1) ? core::empty_rows_like(x) : Tensor();
    return Device::backward(dx, dgate, dy, x, gate, w, rstd, options, core::wants(wanted, 2));
  }
};

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
  using Privates = core::Privates<Backward>;
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
    const bool unit = x.sym_strides().back() == 1;
    const auto dtype = x.options().dtype(options.result_type(x, w));
    Tensor y = at::empty_like(x, unit ? dtype : dtype.memory_format(at::MemoryFormat::Contiguous));
    Tensor rstd = save ? core::empty_per_row(by_group(y, groups, columns), core::compute_type(x)) : Tensor();
    Device::forward(y, rstd, x, gate, w, options, group_size);
    return {y, rstd};
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

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), gate = node.take(1), weight = node.take(2), rstd = node.take(3);
    const auto& [eps, offset, mode, activation, gate_first, group_size] = node.options;
    const bool overwrites = node.needs(0) && node.may_overwrite(dy, x);
    auto [dx, dgate, dweight] =
        Backward::call(overwrites, dy, x, gate, weight, rstd, node.wanted(), offset, mode, activation, gate_first);
    return {dx, dgate, dweight};
  }
};

}  // namespace

LIGER_OPERATOR(RmsNormGated)

}  // namespace liger::ops::rms_norm_gated
