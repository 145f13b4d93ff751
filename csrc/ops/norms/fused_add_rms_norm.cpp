// fused_add_rms_norm(x, residual, weight, ...) -> (rms_norm(s, weight, ...), s), where s = x + residual is rounded as a
// separate addition would round it. Makes one pass over memory instead of two.
//
// x, residual: (..., n); weight: (n,). Kernels, casting modes and backward are those of rms_norm.

#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "core/rows.h"
#include "ops/norms/rms_norm.h"

namespace liger::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

constexpr const char* kOp = "fused_add_rms_norm";

// Forward for autograd, which also returns rstd; `fused` below is forward without autograd.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> fwd(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
    c10::string_view mode) {
  rms_norm::check(kOp, x, residual, value_or_undefined(weight), eps, mode);
  auto out = Device::forward(kOp, x, residual, value_or_undefined(weight), eps, offset, mode, true);
  return {out.y, out.s, out.rstd};
}

template <class Device>
std::tuple<Tensor, Tensor> fused(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
    c10::string_view mode) {
  rms_norm::check(kOp, x, residual, value_or_undefined(weight), eps, mode);
  auto out = Device::forward(kOp, x, residual, value_or_undefined(weight), eps, offset, mode, false);
  return {out.y, out.s};
}

struct Node : core::BackwardNode<Node, 3> {  // s, weight, rstd
  double offset;
  std::string casting_mode;

  auto state() { return std::tie(offset, casting_mode); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dy = std::move(grads[0]), ds = grads.size() > 1 ? std::move(grads[1]) : Tensor();
    Tensor s = take(0), weight = take(1), rstd = take(2);
    if (!dy.defined()) return {ds, ds, Tensor()};
    bool overwrite = may_overwrite(dy, s);
    int64_t wanted = core::wanted_bits(needs(0) || needs(1), needs(2));
    auto [dx, dweight] = rms_norm::backward(dy, ds, s, weight, rstd, offset, casting_mode, wanted, overwrite);
    return {dx, dx, dweight};
  }
};

std::tuple<Tensor, Tensor> fused_autograd(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
    c10::string_view mode) {
  core::check_dense(kOp, "x", x);
  core::check_dense(kOp, "residual", residual);
  core::check_dense(kOp, "weight", weight);
  core::check_no_forward_ad(kOp, x, residual, weight);
  if (!torch::autograd::compute_requires_grad(x, residual, weight)) {
    static const auto op = core::find_op<decltype(fused<rms_norm::Meta>)>("liger::fused_add_rms_norm");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, residual, weight, eps, offset, mode);
  }
  auto node = core::make_node<Node>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, residual, weight));
  node->offset = offset;
  node->casting_mode = mode;
  Tensor y, s, rstd;
  {
    static const auto op = core::find_op<decltype(fwd<rms_norm::Meta>)>("liger::_fused_add_rms_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, s, rstd) = op.call(x, residual, weight, eps, offset, mode);
  }
  torch::autograd::set_history(y, node);
  // The sum does not depend on weight, so a gradient of weight alone does not make it differentiable.
  bool s_has_gradient = torch::autograd::compute_requires_grad(x, residual);
  if (s_has_gradient) torch::autograd::set_history(s, node);
  node->saved = {
      core::SavedVariable(s, s_has_gradient), core::SavedVariable(weight, false), core::SavedVariable(rstd, false)};
  return {y, s};
}

// The sum has the wider dtype, as without autocast. The norm follows torch's own rms_norm.
template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> fused_autocast(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
    c10::string_view mode) {
  static const auto op = core::find_op<decltype(fused<rms_norm::Meta>)>("liger::fused_add_rms_norm");
  c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  if (kDevice == c10::DeviceType::CUDA && core::torch_autocasts_to_float("rms_norm")) {
    return op.call(
        core::autocast_float(x), core::autocast_float(residual), core::autocast_float(weight), eps, offset, mode);
  }
  const auto wider = at::promote_types(x.scalar_type(), residual.scalar_type());
  OptionalTensor parameter = weight;
  if (weight && weight->defined() && weight->scalar_type() != at::kFloat) parameter = weight->to(wider);
  return op.call(x.to(wider), residual.to(wider), parameter, eps, offset, mode);
}

template <class Device>
void implement(torch::Library& m) {
  core::implement<fused<Device>>(m, "fused_add_rms_norm");
  core::implement<fwd<Device>>(m, "_fused_add_rms_norm_fwd");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(
      m,
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, float offset=0.0, str "
      "casting_mode=\"llama\") -> (Tensor, Tensor)");
  core::define(
      m,
      "_fused_add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<rms_norm::Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<rms_norm::Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<rms_norm::Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("fused_add_rms_norm", fused_autograd); }

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) {
  core::implement<fused_autocast<c10::DeviceType::CUDA>>(m, "fused_add_rms_norm");
}
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) {
  core::implement<fused_autocast<c10::DeviceType::CPU>>(m, "fused_add_rms_norm");
}

}  // namespace liger::ops
