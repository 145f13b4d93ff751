// rms_norm(x, weight, eps, offset, casting_mode) = x * rsqrt(mean(x^2) + eps) * (weight + offset)
//
// x: (..., n) of any strides; weight: (n,) in x's dtype or fp32. The result has x's dtype. Statistics are fp32.
// casting_mode says where the normalised row is rounded: see casting_mode.h.

#include "ops/norms/rms_norm.h"

#include "core/operator.h"

namespace liger::ops::rms_norm {

Forward forward(
    ForwardOn* device, const char* op, bool save_rstd, const Tensor& x, const Tensor& residual,
    const OptionalTensor& weight_in, double eps, double offset, std::string_view casting_mode) {
  const Tensor weight = core::value_or_undefined(weight_in);
  core::check_rows(op, "x", x);
  if (residual.defined()) core::check_same(op, "residual", residual, "x", x);
  if (weight.defined()) core::check_column_parameter(op, "weight", weight, x);
  core::check_eps(op, eps);
  core::check_casting_mode(op, casting_mode);
  Forward out{.y = core::empty_rows_like(x)};
  if (residual.defined()) out.s = at::empty_like(out.y);
  if (save_rstd) out.rstd = core::empty_per_row(out.y, core::compute_type(x));
  device(op, out, x, residual, weight, eps, offset, casting_mode);
  return out;
}

void Meta::forward(const char*, Forward&, Tensor, Tensor, Tensor, double, double, std::string_view) {}

std::tuple<Tensor, Tensor> Meta::backward(
    const Tensor& dx, Tensor, Tensor, Tensor, Tensor weight, Tensor, double, std::string_view, bool needs_dweight) {
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
  using Privates = core::Privates<Backward>;
  using Cpu = rms_norm::Cpu;
  using Cuda = rms_norm::Cuda;
  using Meta = rms_norm::Meta;

  template <class Device>
  static Forward run(
      bool save, const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
    auto out = rms_norm::forward(Device::forward, kOp, save, x, {}, weight, eps, offset, mode);
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

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor()};
    Tensor x = node.take(0), weight = node.take(1), rstd = node.take(2);
    const auto& [eps, offset, mode] = node.options;
    const bool overwrites = node.needs(0) && node.may_overwrite(dy, x);
    auto [dx, dweight] = Backward::call(overwrites, dy, {}, x, weight, rstd, node.wanted(), offset, mode);
    return {dx, dweight};
  }
};

}  // namespace

LIGER_OPERATOR(RmsNorm)

}  // namespace liger::ops::rms_norm
