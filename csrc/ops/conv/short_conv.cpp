// short_conv(bcx, weight, bias, *, seq_idx, cu_seqlens)
//     = C * (bias + sum over j < W of weight[:, j] * (B * x)[:, t - (W - 1 - j)])
//
// bcx: (B, S, 3 * C) of any strides, the columns of B, C and x; a copy is made only if the columns are not adjacent.
// weight: (C, W) in bcx's dtype or fp32; bias: (C,) in weight's dtype. seq_idx, cu_seqlens: as in causal_conv1d.
//
// Arithmetic is fp32. B * x, the convolution and the result are rounded.
//
// Backward reads bcx again and recomputes B * x and the convolution. It writes all gradients of bcx into one tensor.

#include "ops/conv/short_conv.h"

#include "core/operator.h"
#include "runtime/status.h"

namespace liger::ops::short_conv {

namespace {

/// Returns the shape of y.
c10::SymDimVector check(const Arguments& a) {
  const Tensor& bcx = a.x;
  core::check_activation(a.op, "bcx", bcx);
  LIGER_CHECK(bcx.dim() == 3 && bcx.sym_size(2) % 3 == 0, a.op, "bcx", "have shape (B, S, 3 * C)", bcx.sym_sizes());
  const auto channels = bcx.sym_size(2) / 3;
  causal_conv1d::check(a, channels);
  return {bcx.sym_size(0), bcx.sym_size(1), channels};
}

/// Of bcx: a column of one part for each channel.
Columns columns_of(const Tensor& bcx) { return {1, bcx.size(2), {bcx.size(2) / 3, 0, 0}}; }

struct Backward : core::Private<
                      Backward,
                      Three(
                          const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                          const OptionalTensor&, int64_t)> {
  static constexpr const char* kName = "_short_conv_bwd";
  static constexpr const char* kArguments = "dy, bcx, weight, bias, seq_idx, cu_seqlens, wanted";

  template <class Device>
  static Three run(
      const Tensor& dy, const Tensor& bcx, const Tensor& weight, const OptionalTensor& bias,
      const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, int64_t wanted) {
    const Arguments a{kBackward, "bcx", bcx, weight, bias, seq_idx, cu_seqlens};
    check_gradient(a, "dy", dy, check(a));
    const Gradients out = gradients_of(a, wanted);
    if constexpr (Device::kComputes) {
      if (bcx.is_cpu()) runtime::count_cpu_call();
      if (dy.numel()) {
        Device::backward(adjacent_columns(dy), inputs_of(a, columns_of(bcx)), out);
      } else {
        out.zero();
      }
    }
    return {out.dx, out.dweight, out.dbias};
  }
};

struct ShortConv
    : core::Operator<
          ShortConv,
          Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)> {
  static constexpr const char* kOp = short_conv::kOp;
  static constexpr const char* kSchema = schemas::short_conv;
  using Edges = core::Positions<0, 1, 2>;
  using Saves =
      core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>>;
  using Privates = core::Privates<Backward>;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = short_conv::Cpu;
  using Cuda = short_conv::Cuda;
  using Meta = short_conv::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& bcx, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
      const OptionalTensor& cu_seqlens) {
    const Arguments a{kOp, "bcx", bcx, weight, bias, seq_idx, cu_seqlens};
    Tensor y = at::empty_symint(check(a), bcx.options());
    if constexpr (Device::kComputes) {
      if (bcx.is_cpu()) runtime::count_cpu_call();
      if (y.numel()) Device::forward(inputs_of(a, columns_of(bcx)), y);
    }
    return y;
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    const Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor bcx = node.take(0), weight = node.take(1), bias = node.take(2), seq_idx = node.take(3),
                 cu_seqlens = node.take(4);
    auto [dbcx, dweight, dbias] = Backward::call(dy, bcx, weight, bias, seq_idx, cu_seqlens, node.wanted());
    return {dbcx, dweight, dbias};
  }
};

}  // namespace

LIGER_OPERATOR(ShortConv)

}  // namespace liger::ops::short_conv
