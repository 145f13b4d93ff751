// rms_norm(x, weight, eps, offset, casting_mode) = x * rsqrt(mean(x^2) + eps) * (weight + offset)
//
// x: (..., n) of any strides; weight: (n,) in x's dtype or fp32. The result has x's dtype. Statistics are fp32.
// casting_mode says where the normalised row is rounded: see casting_mode.h.

#include "ops/norms/rms_norm.h"

#include "core/operator.h"
#include "core/rows.h"

namespace liger::ops::rms_norm {

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

void check(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    std::string_view casting_mode) {
  core::check_rows(op, "x", x);
  if (residual.defined()) core::check_same(op, "residual", residual, "x", x);
  if (weight.defined()) core::check_column_parameter(op, "weight", weight, x);
  core::check_eps(op, eps);
  core::check_casting_mode(op, casting_mode);
}

Forward Meta::forward(
    const char*, const Tensor& x, const Tensor& residual, const Tensor&, double, double, std::string_view,
    bool save_rstd) {
  Forward out;
  out.y = core::empty_rows_like(x);
  if (residual.defined()) out.s = at::empty_like(out.y);
  if (save_rstd) out.rstd = core::empty_per_row(out.y, core::compute_type(x));
  return out;
}

std::tuple<Tensor, Tensor> Meta::backward(
    const Tensor&, const Tensor&, const Tensor&, const Tensor& weight, const Tensor&, double, std::string_view,
    const Tensor& dx, bool needs_dweight) {
  return {dx, needs_dweight ? at::empty_like(weight) : Tensor()};
}

namespace {

struct RmsNorm
    : core::Operator<RmsNorm, Tensor(const Tensor&, const OptionalTensor&, double, double, c10::string_view)> {
  static constexpr const char* kOp = rms_norm::kOp;
  static constexpr const char* kSchema = schemas::rms_norm;
  using Edges = core::Positions<0, 1>;
  using Forward = std::tuple<Tensor, Tensor>;  // y, rstd
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Result<1>>;
  using Cpu = rms_norm::Cpu;
  using Cuda = rms_norm::Cuda;
  using Meta = rms_norm::Meta;

  template <class Device>
  static Forward run(
      bool save, const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
    const Tensor w = value_or_undefined(weight);
    check(kOp, x, {}, w, eps, mode);
    auto out = Device::forward(kOp, x, {}, w, eps, offset, mode, save);
    return {out.y, out.rstd};
  }

  // PyTorch's policy for its own rms_norm on CUDA: float32 in and out, in releases that autocast it.
  struct Autocast {
    static constexpr bool kCpu = false, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      if (!core::autocasts_rms_norm_to_float()) return;
      auto& [x, weight, eps, offset, mode] = arguments;
      x = core::autocast_float(x);
      weight = core::autocast_float(weight);
    }
  };

  // ---- Backward

  template <class Device>
  static std::tuple<Tensor, Tensor> bwd(
      const Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
      int64_t wanted, double offset, c10::string_view mode) {
    const Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
    return Device::backward(
        dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dx, wanted & core::kWantWeight);
  }

  template <class Device>
  static Tensor bwd_(
      Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
      int64_t wanted, double offset, c10::string_view mode) {
    return std::get<1>(Device::backward(
        dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dy, wanted & core::kWantWeight));
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_rms_norm_bwd",
        "Tensor(a!) dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, int wanted, float offset, str casting_mode",
        "(Tensor, Tensor)", "Tensor");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_rms_norm_bwd");
    core::implement<bwd_<Device>>(m, "_rms_norm_bwd_");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor()};
    Tensor x = node.take(0), weight = node.take(1), rstd = node.take(2);
    const auto& [eps, offset, mode] = node.options;
    const int64_t wanted = core::wanted_bits(node.needs(0), node.needs(1));
    auto [dx, dweight] = rms_norm::backward(dy, {}, x, weight, rstd, offset, mode, wanted, node.may_overwrite(dy, x));
    return {dx, dweight};
  }
};

}  // namespace

std::tuple<Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& ds, const Tensor& s, const Tensor& weight, const Tensor& rstd, double offset,
    const std::string& casting_mode, int64_t wanted, bool overwrite_dy) {
  if (overwrite_dy && (wanted & core::kWantInput)) {
    static const auto op = core::find_op<decltype(RmsNorm::bwd_<Meta>)>("_rms_norm_bwd_");
    Tensor dx = dy;
    Tensor dweight = op.call(dx, ds, s, weight, rstd, wanted, offset, casting_mode);
    return {dx, dweight};
  }
  static const auto op = core::find_op<decltype(RmsNorm::bwd<Meta>)>("_rms_norm_bwd");
  return op.call(dy, ds, s, weight, rstd, wanted, offset, casting_mode);
}

LIGER_OPERATOR(RmsNorm)

}  // namespace liger::ops::rms_norm
