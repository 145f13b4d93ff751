#pragma once

// out = act(gate) * up, elementwise, perhaps with up clamped, and its gradients, for any activation. Shared by swiglu
// and geglu.
//
// gate, up: (..., n) of any strides, or gate_up: (..., 2 n) with gate in the first half and up in the second.
// Only the inputs are saved. Backward recomputes act(gate), and overwrites the inputs if nothing else can see them.
// The third form returns F.linear(out, weight, bias). F.linear alone would save the product; here backward recomputes
// it in the pass over gate and up that it makes anyway.
//
// An Activation has
//   kOp, kPackedOp, kLinearOp         the names of its operators
//   kArguments, kPackedArguments      the names of the arguments of their private operators
//   Forward, Backward                 its kernels
//   Activation(op, options...)        checks the options
//   with_math(f)                      calls f with an object that has value(x) and value_and_slope(x), for act and
//                                     act', and up(x) and up_gradient(x, gradient), as in PlainUp
//   set(args)                         writes the options to a kernel's arguments

#include "core/operator.h"
#include "core/rows/rows.h"
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

/// up enters the product as it is.
struct PlainUp {
  template <class C>
  static C up(C x) {
    return x;
  }

  template <class C>
  static C up_gradient(C, C gradient) {
    return gradient;
  }
};

/// O: the types of the options.
template <class Activation, class... O>
struct Gated {
  using Tensor = at::Tensor;
  static constexpr const char* kOp = Activation::kOp;
  static constexpr const char* kPackedOp = Activation::kPackedOp;
  static constexpr const char* kLinearOp = Activation::kLinearOp;

  struct Halves {
    Tensor gate, up;
  };

  static Halves halves(const Tensor& gate_up) {
    int64_t n = gate_up.size(-1) / 2;
    return {gate_up.narrow(-1, 0, n), gate_up.narrow(-1, n, n)};
  }

  // ---- Checks

  static Activation check(const Tensor& gate, const Tensor& up, O... options) {
    check_activation(kOp, "gate", gate);
    check_same(kOp, "up", up, "gate", gate);
    return Activation(kOp, options...);
  }

  static Activation check_linear(
      const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, O... options) {
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

  static Activation check_packed(const Tensor& gate_up, O... options) {
    check_activation(kPackedOp, "gate_up", gate_up);
    LIGER_CHECK(
        gate_up.sym_size(-1) % 2 == 0, kPackedOp, "gate_up", "have an even last dimension", gate_up.sym_size(-1));
    return Activation(kPackedOp, options...);
  }

  using Cpu = gated::Cpu<Activation>;
  using Cuda = gated::Cuda<Activation>;
  // Allocates like the others and computes nothing.
  struct Meta {};

  // ---- Private operators

  /// The gradients of gate and up and, as a third result, act(gate) * up.
  template <class R, class Written>
  struct Gradients : Private<Gradients<R, Written>, R(const Tensor&, const Tensor&, const Tensor&, O...), Written> {
    static constexpr bool kProduct = std::tuple_size_v<R> == 3;
    static constexpr const char* kArguments = Activation::kArguments;
    static std::string name() { return std::string("_") + kOp + (kProduct ? "_product_bwd" : "_bwd"); }

    template <class Device>
    static R run(auto into, const Tensor& dout, const Tensor& gate, const Tensor& up, O... options) {
      Activation activation = check(gate, up, options...);
      check_same(kOp, "dout", dout, "gate", gate);
      for (Tensor& t : into) {
        if (!t.defined()) t = empty_rows_like(gate);
      }
      if constexpr (computes<Device>) {
        const Tensor product = kProduct ? into.back() : Tensor();
        LIGER_CHECK(
            !product.is_same(dout) || same_strides(gate, dout), kOp, "dout",
            c10::str("have the strides of gate, ", gate.strides()), dout.strides());
        Device::backward(activation, into[0], into[1], product, in_layout_of(into[0], dout), gate, up);
      }
      return std::tuple_cat(std::move(into));
    }
  };
  using Backward = Gradients<std::tuple<Tensor, Tensor>, Overwrites<1, 2>>;
  using ProductBackward = Gradients<std::tuple<Tensor, Tensor, Tensor>, Overwrites<1, 2, 0>>;

  struct PackedBackward : Private<PackedBackward, Tensor(const Tensor&, const Tensor&, O...), Overwrites<1>> {
    static constexpr const char* kArguments = Activation::kPackedArguments;
    static std::string name() { return std::string("_") + kPackedOp + "_bwd"; }

    template <class Device>
    static Tensor run(const auto& into, const Tensor& dout, const Tensor& gate_up, O... options) {
      Activation activation = check_packed(gate_up, options...);
      LIGER_CHECK(
          dout.sym_sizes().equals(half_sizes(gate_up)), kPackedOp, "dout",
          c10::str("have half the columns of gate_up, ", gate_up.sym_sizes()), dout.sym_sizes());
      Tensor dgate_up = into[0];
      if (!dgate_up.defined()) {
        dgate_up = at::empty_like(gate_up, gate_up.options().memory_format(at::MemoryFormat::Contiguous));
      }
      if constexpr (computes<Device>) {
        auto [dgate, dup] = halves(dgate_up);
        // dgate_up is contiguous, and its halves can only be walked together with contiguous tensors.
        auto [gate, up] = halves(gate_up.contiguous());
        Device::backward(activation, dgate, dup, {}, dout.contiguous(), gate, up);
      }
      return dgate_up;
    }
  };

  template <class Device>
  static constexpr bool computes = !std::is_same_v<Device, Meta>;

  // An incoming gradient may be expanded or have another layout. walk_rows() needs a dense lead with contiguous rows.
  static Tensor in_layout_of(const Tensor& like, const Tensor& t) {
    return same_strides(like, t) ? t : at::empty_like(like).copy_(t);
  }

  static at::SymDimVector half_sizes(const Tensor& gate_up) {
    at::SymDimVector sizes(gate_up.sym_sizes().begin(), gate_up.sym_sizes().end());
    sizes.back() = sizes.back() / 2;
    return sizes;
  }

  static bool may_overwrite_both(const auto& node, const Tensor& gate, const Tensor& up) {
    return node.may_overwrite(gate, up) && node.may_overwrite(up, gate) && gate.stride(-1) == 1;
  }

  // ---- The operators

  /// What they have in common.
  template <class Op, class Type>
  struct Form : Operator<Op, Type> {
    using Cpu = Gated::Cpu;
    using Cuda = Gated::Cuda;
    using Meta = Gated::Meta;
  };

  struct Halved : Form<Halved, Tensor(const Tensor&, const Tensor&, O...)> {
    static constexpr const char* kOp = Activation::kOp;
    static constexpr const char* kSchema = Activation::kSchema;
    using Edges = Positions<0, 1>;
    using Saves = core::Saves<Argument<0>, Argument<1>>;
    using Privates = core::Privates<Backward, ProductBackward>;
    // Multiplication promotes mixed dtypes, with autocast and without. This operator requires one dtype.
    using Autocast = AutocastPromote<0, 1>;

    template <class Device>
    static Tensor run(bool, const Tensor& gate, const Tensor& up, O... options) {
      Activation activation = check(gate, up, options...);
      Tensor out = empty_rows_like(gate);
      if constexpr (computes<Device>) Device::forward(activation, out, gate, up);
      return out;
    }

    static variable_list backward(auto& node, variable_list&& grads) {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return {Tensor(), Tensor()};
      Tensor gate = node.take(0), up = node.take(1);
      auto [dgate, dup] = with_options(node.options, [&](const auto&... o) {
        return Backward::call(may_overwrite_both(node, gate, up), dout, gate, up, o...);
      });
      return {dgate, dup};
    }
  };

  struct Packed : Form<Packed, Tensor(const Tensor&, O...)> {
    static constexpr const char* kOp = kPackedOp;
    static constexpr const char* kSchema = Activation::kPackedSchema;
    using Edges = Positions<0>;
    using Saves = core::Saves<Argument<0>>;
    using Privates = core::Privates<PackedBackward>;

    template <class Device>
    static Tensor run(bool, const Tensor& gate_up, O... options) {
      Activation activation = check_packed(gate_up, options...);
      auto sizes = half_sizes(gate_up);
      Tensor out = at::empty_symint(sizes, gate_up.options().memory_format(at::MemoryFormat::Contiguous));
      if constexpr (computes<Device>) {
        auto [gate, up] = halves(gate_up);
        Device::forward(activation, out, gate, up);
      }
      return out;
    }

    static variable_list backward(auto& node, variable_list&& grads) {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return {Tensor()};
      Tensor gate_up = node.take(0);
      const bool overwrite = node.may_overwrite(gate_up, gate_up) && gate_up.is_contiguous();
      return {with_options(
          node.options, [&](const auto&... o) { return PackedBackward::call(overwrite, dout, gate_up, o...); })};
    }
  };

  struct Linear : Form<Linear, Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, O...)> {
    static constexpr const char* kOp = kLinearOp;
    static constexpr const char* kSchema = Activation::kLinearSchema;
    using Edges = Positions<0, 1, 2, 3>;
    using Saves = core::Saves<Argument<0>, Argument<1>, Argument<2>>;
    using Autocast = AutocastLinear<0, 1, 2, 3>;

    template <class Device>
    static Tensor run(
        bool, const Tensor& gate, const Tensor& up, const Tensor& weight, const OptionalTensor& bias, O... options) {
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

    static variable_list backward(auto& node, variable_list&& grads) {
      Tensor dout = std::move(grads[0]);
      if (!dout.defined()) return variable_list(4);
      Tensor gate = node.take(0), up = node.take(1), weight = node.take(2), dgate, dup, product, dweight, dbias;
      if (node.needs(3)) dbias = as_matrix(dout).sum(0);
      const bool wants_weight = node.needs(2);
      if (node.needs(0) || node.needs(1)) {
        if (!core::has_memory(weight)) core::refuse_memory(std::string(kOp) + " backward", "weight", weight);
        at::SymDimVector sizes(gate.sym_sizes().begin(), gate.sym_sizes().end());
        // An ordinary view would be a second owner, so the buffer could not be overwritten.
        Tensor d = at::_unsafe_view_symint(gemm::mm(as_matrix(dout), weight), sizes);
        const bool overwrite = may_overwrite_both(node, gate, up);
        with_options(node.options, [&](const auto&... o) {
          if (wants_weight) {
            const bool overwrite_all = overwrite && is_sole_owner(d) && same_strides(gate, d);
            std::tie(dgate, dup, product) = ProductBackward::call(overwrite_all, d, gate, up, o...);
          } else {
            std::tie(dgate, dup) = Backward::call(overwrite, d, gate, up, o...);
          }
        });
      } else if (wants_weight) {
        product = with_options(node.options, [&](const auto&... o) { return Halved::handle().call(gate, up, o...); });
      }
      if (wants_weight) dweight = gemm::mm(as_matrix(dout).t(), as_matrix(product));
      return {dgate, dup, dweight, dbias};
    }
  };
};

}  // namespace liger::ops::gated

/// Registers the three operators of a Gated.
#define LIGER_GATED(Gated) LIGER_OPERATOR(Gated::Halved) LIGER_OPERATOR(Gated::Packed) LIGER_OPERATOR(Gated::Linear)
