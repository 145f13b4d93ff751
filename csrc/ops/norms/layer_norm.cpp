// layer_norm(x, weight, bias, eps) = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
//
// x: (..., n) of any strides; weight, bias: (n,) in x's dtype or fp32, both optional. The result has x's dtype.
// Statistics are fp32.

#include "ops/norms/layer_norm.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"

namespace liger::ops::layer_norm {

Forward Meta::forward(const Tensor& x, const OptionalTensor&, const OptionalTensor&, double, bool save) {
  Forward out{core::empty_rows_like(x), {}};
  if (save) out.statistics = empty_statistics(out.y);
  return out;
}

Gradients Meta::backward(
    const Tensor&, const Tensor& x, const OptionalTensor&, const Tensor&, const Tensor& dx, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters) {
  auto parameter = [&](bool needed) {
    return needed ? at::empty_symint({x.sym_sizes().back()}, x.options().dtype(parameters)) : Tensor();
  };
  return {dx, parameter(needs_dweight), parameter(needs_dbias)};
}

namespace {

void check(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  core::check_activation(kOp, "x", x);
  if (weight && weight->defined()) core::check_column_parameter(kOp, "weight", *weight, x);
  if (bias && bias->defined()) core::check_column_parameter(kOp, "bias", *bias, x);
  if (weight && bias && weight->defined() && bias->defined()) {
    LIGER_CHECK(
        weight->scalar_type() == bias->scalar_type(), kOp, "bias",
        c10::str("have the dtype of weight, ", weight->scalar_type()), bias->scalar_type());
  }
  core::check_eps(kOp, eps);
}

// ---- The dispatched ops, for each of the three backends

template <class Device>
Tensor apply(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  check(x, weight, bias, eps);
  return Device::forward(x, weight, bias, eps, false).y;
}

template <class Device>
std::tuple<Tensor, Tensor> fwd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  check(x, weight, bias, eps);
  auto out = Device::forward(x, weight, bias, eps, true);
  return {out.y, out.statistics};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> bwd(
    const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, int64_t wanted,
    at::ScalarType parameters) {
  Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
  auto out =
      Device::backward(dy, x, weight, statistics, dx, wanted & core::kWantWeight, wanted & core::kWantBias, parameters);
  return {out.dx, out.dweight, out.dbias};
}

// Overwrites dy with dx.
template <class Device>
std::tuple<Tensor, Tensor> bwd_(
    Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, int64_t wanted,
    at::ScalarType parameters) {
  auto out =
      Device::backward(dy, x, weight, statistics, dy, wanted & core::kWantWeight, wanted & core::kWantBias, parameters);
  return {out.dweight, out.dbias};
}

// ---- Autograd and autocast

struct LayerNormBackward : core::BackwardNode<LayerNormBackward, 3> {  // x, weight, statistics
  at::ScalarType parameters;

  auto state() { return std::tie(parameters); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = take(0), weight = take(1), statistics = take(2);
    int64_t wanted = core::wanted_bits(needs(0), needs(1), needs(2));
    if (needs(0) && may_overwrite(dy, x)) {
      static const auto op = core::find_op<decltype(bwd_<Meta>)>("liger::_layer_norm_bwd_");
      auto [dweight, dbias] = op.call(dy, x, weight, statistics, wanted, parameters);
      return {dy, dweight, dbias};
    }
    static const auto op = core::find_op<decltype(bwd<Meta>)>("liger::_layer_norm_bwd");
    auto [dx, dweight, dbias] = op.call(dy, x, weight, statistics, wanted, parameters);
    return {dx, dweight, dbias};
  }
};

Tensor layer_norm_autograd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  core::check_dense(kOp, "x", x);
  core::check_dense(kOp, "weight", weight);
  core::check_dense(kOp, "bias", bias);
  core::check_no_forward_ad(kOp, x, weight, bias);
  if (!torch::autograd::compute_requires_grad(x, weight, bias)) {
    static const auto op = core::find_op<decltype(apply<Meta>)>("liger::layer_norm");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, bias, eps);
  }
  auto node = core::make_node<LayerNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->parameters = parameter_type(x, weight.value_or(Tensor()), bias.value_or(Tensor()));
  Tensor y, statistics;
  {
    static const auto op = core::find_op<decltype(fwd<Meta>)>("liger::_layer_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, statistics) = op.call(x, weight, bias, eps);
  }
  node->saved = {
      core::SavedVariable(x, false), core::SavedVariable(weight, false), core::SavedVariable(statistics, false)};
  torch::autograd::set_history(y, node);
  return y;
}

// PyTorch's policy for norms on CUDA: float32 in and out.
Tensor layer_norm_autocast(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static const auto op = core::find_op<decltype(apply<Meta>)>("liger::layer_norm");
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return op.call(core::autocast_float(x), core::autocast_float(weight), core::autocast_float(bias), eps);
}

template <class Device>
void implement(torch::Library& m) {
  core::implement<apply<Device>>(m, "layer_norm");
  core::implement<fwd<Device>>(m, "_layer_norm_fwd");
  core::implement<bwd<Device>>(m, "_layer_norm_bwd");
  core::implement<bwd_<Device>>(m, "_layer_norm_bwd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(m, "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor");
  core::define(m, "_layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)");
  core::define(
      m,
      "_layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, int wanted, ScalarType parameters) -> "
      "(Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_layer_norm_bwd_(Tensor(a!) dy, Tensor x, Tensor? weight, Tensor statistics, int wanted, ScalarType parameters) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("layer_norm", layer_norm_autograd); }

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<layer_norm_autocast>(m, "layer_norm"); }

}  // namespace liger::ops::layer_norm
