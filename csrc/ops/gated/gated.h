#pragma once

// out = act(gate) * up, elementwise, and its gradients, for any activation. Shared by swiglu and geglu.
//
// gate, up: (..., n) of any strides, or gate_up: (..., 2 n) with gate in the first half and up in the second.
// Only the inputs are saved. Backward recomputes act(gate), and overwrites the inputs if nothing else can see them.
// The third form returns F.linear(out, weight, bias). F.linear alone would save the product; here backward recomputes
// it in the pass over gate and up that it makes anyway.
//
// An Activation has
//   kOp, kPackedOp, kLinearOp         the names of its ops
//   Forward, Backward                 its kernels
//   options()                         the options in the op's schema, as a tuple; the constructor checks them
//   with_math(f)                      calls f with an object that has value(x) and value_and_slope(x), for act and act'
//   set(args)                         writes the options to a kernel's arguments

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "core/rows.h"
#include "gemm/mm.h"
#include "gemm/multiply.h"
#include "ops/gated/gated_cpu.h"
#include "ops/gated/gated_cuda.h"

namespace liger::ops::gated {

using namespace core;

template <class C>
struct ValueAndSlope {
  C value, slope;
};

template <class Activation, class... Options>
struct Gated {
  using Tensor = at::Tensor;
  static constexpr const char* kOp = Activation::kOp;
  static constexpr const char* kPackedOp = Activation::kPackedOp;
  static constexpr const char* kLinearOp = Activation::kLinearOp;
  using OptionalTensor = std::optional<Tensor>;

  struct Halves {
    Tensor gate, up;
  };

  static Halves halves(const Tensor& gate_up) {
    int64_t n = gate_up.size(-1) / 2;
    return {gate_up.narrow(-1, 0, n), gate_up.narrow(-1, n, n)};
  }

  // ---- Checks

  static Activation check(const Tensor& gate, const Tensor& up, Options... options) {
    check_activation(kOp, "gate", gate);
    check_same(kOp, "up", up, "gate", gate);
    return Activation(kOp, options...);
  }

  static Activation check_linear(
      const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, Options... options) {
    check_activation(kLinearOp, "gate", gate);
    check_same(kLinearOp, "up", up, "gate", gate);
    auto check_parameter = [&](const char* name, const Tensor& t) {
      check_dense(kLinearOp, name, t);
      check_same_device(kLinearOp, name, t, "gate", gate);
      LIGER_CHECK(
          t.scalar_type() == gate.scalar_type(), kLinearOp, name,
          c10::str("have the dtype of gate, ", gate.scalar_type()), t.scalar_type());
    };
    check_parameter("weight", weight);
    const auto n = gate.sym_sizes().back();
    LIGER_CHECK(
        weight.dim() == 2 && weight.sym_size(1) == n, kLinearOp, "weight",
        c10::str("have shape [features, ", n, "], the last dimension of gate"), weight.sym_sizes());
    if (bias && bias->defined()) {
      check_parameter("bias", *bias);
      LIGER_CHECK(
          bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kLinearOp, "bias",
          c10::str("have shape [", weight.sym_size(0), "], one value per feature"), bias->sym_sizes());
    }
    return Activation(kLinearOp, options...);
  }

  static Activation check_packed(const Tensor& gate_up, Options... options) {
    check_activation(kPackedOp, "gate_up", gate_up);
    LIGER_CHECK(
        gate_up.sym_size(-1) % 2 == 0, kPackedOp, "gate_up", "have an even last dimension", gate_up.sym_size(-1));
    return Activation(kPackedOp, options...);
  }

  using Cpu = gated::Cpu<Activation>;
  using Cuda = gated::Cuda<Activation>;
  // Allocates like the others and computes nothing.
  struct Meta {};

  // ---- The dispatched ops

  template <class Device>
  static Tensor apply(const Tensor& gate, const Tensor& up, Options... options) {
    Activation activation = check(gate, up, options...);
    Tensor out = empty_rows_like(gate);
    if constexpr (computes<Device>) Device::forward(activation, out, gate, up);
    return out;
  }

  template <class Device>
  static std::tuple<Tensor, Tensor> bwd(const Tensor& dout, const Tensor& gate, const Tensor& up, Options... options) {
    Activation activation = check(gate, up, options...);
    check_same(kOp, "dout", dout, "gate", gate);
    Tensor dgate = empty_rows_like(gate), dup = at::empty_like(dgate);
    if constexpr (computes<Device>) Device::backward(activation, dgate, dup, {}, in_layout_of(dgate, dout), gate, up);
    return {dgate, dup};
  }

  template <class Device>
  static void bwd_(const Tensor& dout, Tensor& gate, Tensor& up, Options... options) {
    Activation activation = check(gate, up, options...);
    check_same(kOp, "dout", dout, "gate", gate);
    if constexpr (computes<Device>) Device::backward(activation, gate, up, {}, in_layout_of(gate, dout), gate, up);
  }

  /// (dgate, dup, act(gate) * up)
  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> product_bwd(
      const Tensor& dout, const Tensor& gate, const Tensor& up, Options... options) {
    Activation activation = check(gate, up, options...);
    check_same(kOp, "dout", dout, "gate", gate);
    Tensor dgate = empty_rows_like(gate), dup = at::empty_like(dgate), product = at::empty_like(dgate);
    if constexpr (computes<Device>)
      Device::backward(activation, dgate, dup, product, in_layout_of(dgate, dout), gate, up);
    return {dgate, dup, product};
  }

  /// Writes dgate over gate, dup over up, and the product over dout.
  template <class Device>
  static void product_bwd_(Tensor& dout, Tensor& gate, Tensor& up, Options... options) {
    Activation activation = check(gate, up, options...);
    check_same(kOp, "dout", dout, "gate", gate);
    LIGER_CHECK(
        dout.strides().equals(gate.strides()), kOp, "dout", c10::str("have the strides of gate, ", gate.strides()),
        dout.strides());
    if constexpr (computes<Device>) Device::backward(activation, gate, up, dout, dout, gate, up);
  }

  template <class Device>
  static Tensor apply_linear(
      const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, Options... options) {
    Activation activation = check_linear(gate, up, weight, bias, options...);
    Tensor product = empty_rows_like(gate);
    if constexpr (computes<Device>) Device::forward(activation, product, gate, up);
    if constexpr (std::is_same_v<Device, Cuda>) {
      if (!bias || !bias->defined()) {
        c10::DeviceGuard guard(product.device());
        at::DimVector sizes(product.sizes());
        sizes.back() = weight.size(0);
        Tensor out = at::empty(sizes, product.options());
        gemm::multiply(as_matrix(out), as_matrix(product), weight.t(), 0, 1, /*sustained=*/true);
        return out;
      }
    }
    return at::linear(product, weight, bias);
  }

  template <class Device>
  static Tensor apply_packed(const Tensor& gate_up, Options... options) {
    Activation activation = check_packed(gate_up, options...);
    auto sizes = half_sizes(gate_up);
    Tensor out = at::empty_symint(sizes, gate_up.options().memory_format(at::MemoryFormat::Contiguous));
    if constexpr (computes<Device>) {
      auto [gate, up] = halves(gate_up);
      Device::forward(activation, out, gate, up);
    }
    return out;
  }

  template <class Device>
  static Tensor packed_bwd(const Tensor& dout, const Tensor& gate_up, Options... options) {
    Activation activation = check_packed(gate_up, options...);
    Tensor dgate_up = at::empty_like(gate_up, gate_up.options().memory_format(at::MemoryFormat::Contiguous));
    packed_backward<Device>(activation, dgate_up, dout, gate_up);
    return dgate_up;
  }

  template <class Device>
  static void packed_bwd_(const Tensor& dout, Tensor& gate_up, Options... options) {
    packed_backward<Device>(check_packed(gate_up, options...), gate_up, dout, gate_up);
  }

  // ---- Autograd

  template <class AnyNode>
  static bool may_overwrite_both(const AnyNode& node, const Tensor& gate, const Tensor& up) {
    return node.may_overwrite(gate, up) && node.may_overwrite(up, gate) && gate.stride(-1) == 1;
  }

  /// Gradients of gate and up. `overwrite` writes them over gate and up.
  static std::tuple<Tensor, Tensor> gradients(
      const Activation& activation, const Tensor& dout, Tensor& gate, Tensor& up, bool overwrite) {
    if (overwrite) {
      static const auto op = find<decltype(bwd_<Cpu>)>("_", "_bwd_");
      std::apply([&](auto... options) { op.call(dout, gate, up, options...); }, activation.options());
      return {gate.detach(), up.detach()};
    }
    static const auto op = find<decltype(bwd<Cpu>)>("_", "_bwd");
    return std::apply([&](auto... options) { return op.call(dout, gate, up, options...); }, activation.options());
  }

  struct Node : BackwardNode<Node, 2> {  // gate, up
    Activation activation;

    auto state() { return std::tie(activation); }
    std::string name() const override { return kOp; }

    variable_list backward(variable_list&& grads) override {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return {Tensor(), Tensor()};
      Tensor gate = this->take(0), up = this->take(1);
      auto [dgate, dup] = gradients(activation, dout, gate, up, may_overwrite_both(*this, gate, up));
      return {dgate, dup};
    }
  };

  struct LinearNode : BackwardNode<LinearNode, 3> {  // gate, up, weight; bias is the fourth edge
    Activation activation;

    auto state() { return std::tie(activation); }
    std::string name() const override { return kLinearOp; }

    variable_list backward(variable_list&& grads) override {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return variable_list(4);
      Tensor gate = this->take(0), up = this->take(1), weight = this->take(2), dgate, dup, product, dweight, dbias;
      if (this->needs(3)) dbias = as_matrix(dout).sum(0);
      const bool wants_weight = this->needs(2);
      if (this->needs(0) || this->needs(1)) {
        if (!has_memory(weight)) detail::refuse_memory(std::string(kLinearOp) + " backward", "weight", weight);
        at::SymDimVector sizes(gate.sym_sizes().begin(), gate.sym_sizes().end());
        // An ordinary view would be a second owner, so the buffer could not be overwritten.
        Tensor d = at::_unsafe_view_symint(gemm::mm(as_matrix(dout), weight), sizes);
        const bool overwrite = may_overwrite_both(*this, gate, up);
        if (!wants_weight) {
          std::tie(dgate, dup) = gradients(activation, d, gate, up, overwrite);
        } else if (overwrite && is_sole_owner(d) && detail::same_strides(gate, d)) {
          static const auto op = find<decltype(product_bwd_<Cpu>)>("_", "_product_bwd_");
          std::apply([&](auto... options) { op.call(d, gate, up, options...); }, activation.options());
          dgate = gate.detach();
          dup = up.detach();
          product = std::move(d);
        } else {
          static const auto op = find<decltype(product_bwd<Cpu>)>("_", "_product_bwd");
          std::tie(dgate, dup, product) =
              std::apply([&](auto... options) { return op.call(d, gate, up, options...); }, activation.options());
        }
      } else if (wants_weight) {
        static const auto op = find<decltype(Gated::template apply<Cpu>)>("", "");
        product = std::apply([&](auto... options) { return op.call(gate, up, options...); }, activation.options());
      }
      if (wants_weight) dweight = gemm::mm(as_matrix(dout).t(), as_matrix(product));
      return {dgate, dup, dweight, dbias};
    }
  };

  struct PackedNode : BackwardNode<PackedNode, 1> {  // gate_up
    Activation activation;

    auto state() { return std::tie(activation); }
    std::string name() const override { return kPackedOp; }

    variable_list backward(variable_list&& grads) override {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return {Tensor()};
      Tensor gate_up = this->take(0);
      if (this->may_overwrite(gate_up, gate_up) && gate_up.is_contiguous()) {
        static const auto op = find<decltype(packed_bwd_<Cpu>)>("_", "_packed_bwd_");
        std::apply([&](auto... options) { op.call(dout, gate_up, options...); }, activation.options());
        return {gate_up.detach()};
      }
      static const auto op = find<decltype(packed_bwd<Cpu>)>("_", "_packed_bwd");
      return {std::apply([&](auto... options) { return op.call(dout, gate_up, options...); }, activation.options())};
    }
  };

  static Tensor autograd(const Tensor& gate, const Tensor& up, Options... options) {
    static const auto op = find<decltype(apply<Cpu>)>("", "");
    check_dense(kOp, "gate", gate);
    check_dense(kOp, "up", up);
    check_no_forward_ad(kOp, gate, up);
    Tensor out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      out = op.call(gate, up, options...);
    }
    if (torch::autograd::compute_requires_grad(gate, up)) {
      auto node = make_node<Node>();
      node->activation = Activation(kOp, options...);
      node->set_next_edges(torch::autograd::collect_next_edges(gate, up));
      node->saved = {SavedVariable(gate, false), SavedVariable(up, false)};
      torch::autograd::set_history(out, node);
    }
    return out;
  }

  static Tensor autograd_packed(const Tensor& gate_up, Options... options) {
    static const auto op = find<decltype(apply_packed<Cpu>)>("", "_packed");
    check_dense(kPackedOp, "gate_up", gate_up);
    check_no_forward_ad(kPackedOp, gate_up);
    Tensor out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      out = op.call(gate_up, options...);
    }
    if (torch::autograd::compute_requires_grad(gate_up)) {
      auto node = make_node<PackedNode>();
      node->activation = Activation(kPackedOp, options...);
      node->set_next_edges(torch::autograd::collect_next_edges(gate_up));
      node->saved = {SavedVariable(gate_up, false)};
      torch::autograd::set_history(out, node);
    }
    return out;
  }

  static Tensor autograd_linear(
      const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, Options... options) {
    static const auto op = find<decltype(apply_linear<Cpu>)>("", "_linear");
    check_dense(kLinearOp, "gate", gate);
    check_dense(kLinearOp, "up", up);
    check_dense(kLinearOp, "weight", weight);
    check_dense(kLinearOp, "bias", bias);
    const Tensor bias_or_none = bias.value_or(Tensor());
    check_no_forward_ad(kLinearOp, gate, up, weight, bias_or_none);
    Tensor out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      out = op.call(gate, up, weight, bias, options...);
    }
    if (torch::autograd::compute_requires_grad(gate, up, weight, bias_or_none)) {
      auto node = make_node<LinearNode>();
      node->activation = Activation(kLinearOp, options...);
      node->set_next_edges(torch::autograd::collect_next_edges(gate, up, weight, bias_or_none));
      node->saved = {SavedVariable(gate, false), SavedVariable(up, false), SavedVariable(weight, false)};
      torch::autograd::set_history(out, node);
    }
    return out;
  }

  // Casts its arguments as F.linear does under autocast.
  template <c10::DeviceType kDevice>
  static Tensor autocast_linear(
      const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, Options... options) {
    static const auto op = find<decltype(apply_linear<Cpu>)>("", "_linear");
    c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    auto cast = [](const Tensor& t) {
      return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
    };
    OptionalTensor cast_bias = bias && bias->defined() ? OptionalTensor(cast(*bias)) : bias;
    return op.call(cast(gate), cast(up), cast(weight), cast_bias, options...);
  }

  // Multiplication promotes mixed dtypes, with autocast and without. This op requires one dtype.
  template <c10::DeviceType kDevice>
  static Tensor autocast(const Tensor& gate, const Tensor& up, Options... options) {
    static const auto op = find<decltype(apply<Cpu>)>("", "");
    c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    auto wider = at::promote_types(gate.scalar_type(), up.scalar_type());
    return op.call(gate.to(wider), up.to(wider), options...);
  }

  // ---- Registration; each op's own file defines the schemas

  template <class Device>
  static void implement(torch::Library& m) {
    std::string op = kOp;
    core::implement<apply<Device>>(m, op);
    core::implement<apply_packed<Device>>(m, kPackedOp);
    core::implement<apply_linear<Device>>(m, kLinearOp);
    core::implement<bwd<Device>>(m, "_" + op + "_bwd");
    core::implement<bwd_<Device>>(m, "_" + op + "_bwd_");
    core::implement<product_bwd<Device>>(m, "_" + op + "_product_bwd");
    core::implement<product_bwd_<Device>>(m, "_" + op + "_product_bwd_");
    core::implement<packed_bwd<Device>>(m, "_" + op + "_packed_bwd");
    core::implement<packed_bwd_<Device>>(m, "_" + op + "_packed_bwd_");
  }

  static void implement_autograd(torch::Library& m) {
    m.impl(kOp, autograd);
    m.impl(kPackedOp, autograd_packed);
    m.impl(kLinearOp, autograd_linear);
  }

  template <c10::DeviceType kDevice>
  static void implement_autocast(torch::Library& m) {
    core::implement<autocast<kDevice>>(m, kOp);
    core::implement<autocast_linear<kDevice>>(m, kLinearOp);
  }

 private:
  template <class Device>
  static constexpr bool computes = !std::is_same_v<Device, Meta>;

  template <class Function>
  static auto find(const char* before, const char* after) {
    return find_op<Function>((std::string("liger::") + before + kOp + after).c_str());
  }

  // An incoming gradient may be expanded or have another layout. walk_rows() needs a dense lead with contiguous rows.
  static Tensor in_layout_of(const Tensor& like, const Tensor& t) {
    return detail::same_strides(like, t) ? t : at::empty_like(like).copy_(t);
  }

  static at::SymDimVector half_sizes(const Tensor& gate_up) {
    at::SymDimVector sizes(gate_up.sym_sizes().begin(), gate_up.sym_sizes().end());
    sizes.back() = sizes.back() / 2;
    return sizes;
  }

  template <class Device>
  static void packed_backward(
      const Activation& activation, const Tensor& dgate_up, const Tensor& dout, const Tensor& gate_up) {
    LIGER_CHECK(
        dout.sym_sizes().equals(half_sizes(gate_up)), kPackedOp, "dout",
        c10::str("have half the columns of gate_up, ", gate_up.sym_sizes()), dout.sym_sizes());
    if constexpr (computes<Device>) {
      auto [dgate, dup] = halves(dgate_up);
      // dgate_up is contiguous, and its halves can only be walked together with contiguous tensors.
      auto [gate, up] = halves(gate_up.contiguous());
      Device::backward(activation, dgate, dup, {}, dout.contiguous(), gate, up);
    }
  }
};

}  // namespace liger::ops::gated
