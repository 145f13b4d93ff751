// fused_add_rms_norm(x, residual, weight, ...) -> (rms_norm(s, weight, ...), s), where s = x + residual is rounded as a
// separate addition would round it. Makes one pass over memory instead of two.
//
// x, residual: (..., n); weight: (n,). Kernels, casting modes and backward are those of rms_norm.

#include "core/operator.h"
#include "ops/norms/rms_norm.h"

namespace liger::ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

struct FusedAddRmsNorm
    : core::Operator<
          FusedAddRmsNorm, Two(const Tensor&, const Tensor&, const OptionalTensor&, double, double, c10::string_view)> {
  static constexpr const char* kOp = "fused_add_rms_norm";
  static constexpr const char* kSchema = schemas::fused_add_rms_norm;
  using Edges = core::Positions<0, 1, 2>;
  using Forward = std::tuple<Tensor, Tensor, Tensor>;  // y, s, rstd
  using Cpu = rms_norm::Cpu;
  using Cuda = rms_norm::Cuda;
  using Meta = rms_norm::Meta;

  template <class Device>
  static Forward run(
      bool save, const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
      c10::string_view mode) {
    auto out = rms_norm::forward(Device::forward, kOp, save, x, residual, weight, eps, offset, mode);
    return {out.y, out.s, out.rstd};
  }

  // The sum has the wider dtype, as without autocast. The norm follows torch's own rms_norm.
  struct Autocast {
    static constexpr bool kCpu = true, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType device, Arguments& arguments) {
      auto& [x, residual, weight, eps, offset, mode] = arguments;
      const bool to_float = device == c10::DeviceType::CUDA && core::autocasts_rms_norm_to_float();
      if (to_float) {
        x = core::autocast_float(x), residual = core::autocast_float(residual), weight = core::autocast_float(weight);
        return;
      }
      const auto wider = at::promote_types(x.scalar_type(), residual.scalar_type());
      if (weight && weight->defined() && weight->scalar_type() != at::kFloat) weight = weight->to(wider);
      x = x.to(wider), residual = residual.to(wider);
    }
  };

  struct Node : core::BackwardNode<Node, 3> {  // s, weight, rstd
    Options options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    void record(
        const Forward& out, const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double, double,
        c10::string_view) {
      const auto& [y, s, rstd] = out;
      connect(y);
      // The sum does not depend on weight, so a gradient of weight alone does not make it differentiable.
      const bool s_has_gradient = torch::autograd::compute_requires_grad(x, residual);
      if (s_has_gradient) connect(s);
      saved = {
          core::SavedVariable(s, s_has_gradient), core::SavedVariable(weight, false), core::SavedVariable(rstd, false)};
    }

    core::variable_list backward(core::variable_list&& grads) override {
      Tensor dy = std::move(grads[0]), ds = grads.size() > 1 ? std::move(grads[1]) : Tensor();
      Tensor s = take(0), weight = take(1), rstd = take(2);
      if (!dy.defined()) return {ds, ds, Tensor()};
      const auto& [eps, offset, mode] = options;
      const bool needs_sum = needs(0) || needs(1), overwrites = needs_sum && may_overwrite(dy, s);
      auto [dx, dweight] = rms_norm::Backward::call(
          overwrites, dy, ds, s, weight, rstd, core::wanted_bits(needs_sum, needs(2)), offset, mode);
      return {dx, dx, dweight};
    }
  };
};

}  // namespace

LIGER_OPERATOR(FusedAddRmsNorm)

}  // namespace liger::ops
