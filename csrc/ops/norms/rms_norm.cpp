// rms_norm(x, weight, eps, offset, casting_mode) = x * rsqrt(mean(x^2) + eps) * (weight + offset)
//
// x: (..., n) of any strides; weight: (n,) in x's dtype or fp32. The result has x's dtype. Statistics are fp32.
// casting_mode says where the normalised row is rounded: see casting_mode.h.

#include "ops/norms/rms_norm.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "core/rows.h"

namespace liger::ops::rms_norm {

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

void check(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    std::string_view casting_mode) {
  core::check_activation(op, "x", x);
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

// ---- The private ops: forward that also returns rstd, backward, and backward that overwrites dy

template <class Device>
std::tuple<Tensor, Tensor> fwd(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  check(kOp, x, {}, value_or_undefined(weight), eps, mode);
  auto out = Device::forward(kOp, x, {}, value_or_undefined(weight), eps, offset, mode, true);
  return {out.y, out.rstd};
}

template <class Device>
std::tuple<Tensor, Tensor> bwd(
    const Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
    int64_t wanted, double offset, c10::string_view mode) {
  Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
  return Device::backward(
      dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dx, wanted & core::kWantWeight);
}

template <class Device>
Tensor bwd_(
    Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
    int64_t wanted, double offset, c10::string_view mode) {
  return std::get<1>(Device::backward(
      dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dy, wanted & core::kWantWeight));
}

}  // namespace

std::tuple<Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& ds, const Tensor& s, const Tensor& weight, const Tensor& rstd, double offset,
    const std::string& casting_mode, int64_t wanted, bool overwrite_dy) {
  if (overwrite_dy && (wanted & core::kWantInput)) {
    static const auto op = core::find_op<decltype(bwd_<Meta>)>("liger::_rms_norm_bwd_");
    Tensor dx = dy;
    Tensor dweight = op.call(dx, ds, s, weight, rstd, wanted, offset, casting_mode);
    return {dx, dweight};
  }
  static const auto op = core::find_op<decltype(bwd<Meta>)>("liger::_rms_norm_bwd");
  return op.call(dy, ds, s, weight, rstd, wanted, offset, casting_mode);
}

// ---- The public op

namespace {

template <class Device>
Tensor apply(const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  check(kOp, x, {}, value_or_undefined(weight), eps, mode);
  return Device::forward(kOp, x, {}, value_or_undefined(weight), eps, offset, mode, false).y;
}

struct Node : core::BackwardNode<Node, 3> {  // x, weight, rstd
  double offset;
  std::string casting_mode;

  auto state() { return std::tie(offset, casting_mode); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor()};
    Tensor x = take(0), weight = take(1), rstd = take(2);
    bool overwrite = may_overwrite(dy, x);
    auto [dx, dweight] = rms_norm::backward(
        dy, {}, x, weight, rstd, offset, casting_mode, core::wanted_bits(needs(0), needs(1)), overwrite);
    return {dx, dweight};
  }
};

Tensor rms_norm_autograd(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  core::check_dense(kOp, "x", x);
  core::check_dense(kOp, "weight", weight);
  core::check_no_forward_ad(kOp, x, weight);
  if (!torch::autograd::compute_requires_grad(x, weight)) {
    static const auto op = core::find_op<decltype(apply<Meta>)>("liger::rms_norm");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, eps, offset, mode);
  }
  auto node = core::make_node<Node>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
  node->offset = offset;
  node->casting_mode = mode;
  Tensor y, rstd;
  {
    static const auto op = core::find_op<decltype(fwd<Meta>)>("liger::_rms_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, rstd) = op.call(x, weight, eps, offset, mode);
  }
  node->saved = {core::SavedVariable(x, false), core::SavedVariable(weight, false), core::SavedVariable(rstd, false)};
  torch::autograd::set_history(y, node);
  return y;
}

// PyTorch's policy for its own rms_norm on CUDA: float32 in and out, in releases that autocast it.
Tensor rms_norm_autocast(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  static const auto op = core::find_op<decltype(apply<Meta>)>("liger::rms_norm");
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (!core::torch_autocasts_to_float("rms_norm")) return op.call(x, weight, eps, offset, mode);
  return op.call(core::autocast_float(x), core::autocast_float(weight), eps, offset, mode);
}

template <class Device>
void implement(torch::Library& m) {
  core::implement<apply<Device>>(m, "rms_norm");
  core::implement<fwd<Device>>(m, "_rms_norm_fwd");
  core::implement<bwd<Device>>(m, "_rms_norm_bwd");
  core::implement<bwd_<Device>>(m, "_rms_norm_bwd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(
      m,
      "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\") -> "
      "Tensor");
  core::define(
      m, "_rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset, str casting_mode) -> (Tensor, Tensor)");
  core::define(
      m,
      "_rms_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, int wanted, float offset, "
      "str casting_mode) -> (Tensor, Tensor)");
  core::define(
      m,
      "_rms_norm_bwd_(Tensor(a!) dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, int wanted, float "
      "offset, str casting_mode) -> Tensor");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("rms_norm", rms_norm_autograd); }

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<rms_norm_autocast>(m, "rms_norm"); }

}  // namespace liger::ops::rms_norm
