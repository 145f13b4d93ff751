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

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

/// The columns of B, of C, and of x.
c10::SymInt check(
    const char* op, const Tensor& bcx, const Tensor& weight, const Tensor& bias, const Tensor& seq_idx,
    const Tensor& cu_seqlens) {
  core::check_activation(op, "bcx", bcx);
  LIGER_CHECK(bcx.dim() == 3 && bcx.sym_size(2) % 3 == 0, op, "bcx", "have shape (B, S, 3 * C)", bcx.sym_sizes());
  const auto channels = bcx.sym_size(2) / 3;
  causal_conv1d::check_parameters(op, "bcx", bcx, channels, weight, bias);
  causal_conv1d::check_samples(op, "bcx", bcx, seq_idx, cu_seqlens);
  return channels;
}

Inputs inputs_of(
    const char* op, const Tensor& bcx, const Tensor& weight, const Tensor& bias, const Tensor& seq_idx,
    const Tensor& cu_seqlens) {
  return {
      op, causal_conv1d::adjacent_columns(bcx), weight.contiguous(), causal_conv1d::contiguous(bias),
      causal_conv1d::samples_of(op, bcx, seq_idx, cu_seqlens)};
}

struct ShortConv
    : core::Operator<
          ShortConv,
          Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)> {
  static constexpr const char* kOp = short_conv::kOp;
  static constexpr const char* kSchema = schemas::short_conv;
  using Edges = core::Positions<0, 1, 2>;
  using Saves =
      core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>>;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = short_conv::Cpu;
  using Cuda = short_conv::Cuda;
  using Meta = short_conv::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& bcx, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
      const OptionalTensor& cu_seqlens) {
    const Tensor b = value_or_undefined(bias), ids = value_or_undefined(seq_idx), ends = value_or_undefined(cu_seqlens);
    const auto channels = check(kOp, bcx, weight, b, ids, ends);
    Tensor y = at::empty_symint({bcx.sym_size(0), bcx.sym_size(1), channels}, bcx.options());
    if constexpr (Device::kComputes) {
      if (bcx.is_cpu()) runtime::count_cpu_call();
      if (y.numel()) Device::forward(inputs_of(kOp, bcx, weight, b, ids, ends), y);
    }
    return y;
  }

  // ---- Backward

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> bwd(
      const Tensor& dy, const Tensor& bcx, const Tensor& weight, const OptionalTensor& bias,
      const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, int64_t wanted) {
    const Tensor b = value_or_undefined(bias), ids = value_or_undefined(seq_idx), ends = value_or_undefined(cu_seqlens);
    const auto channels = check(kBackward, bcx, weight, b, ids, ends);
    core::check_same_device(kBackward, "dy", dy, "bcx", bcx);
    core::check_dense(kBackward, "dy", dy);
    const c10::SymInt shape[] = {bcx.sym_size(0), bcx.sym_size(1), channels};
    LIGER_CHECK(
        dy.scalar_type() == bcx.scalar_type() && dy.sym_sizes().equals(shape), kBackward, "dy",
        c10::str("have shape ", c10::SymIntArrayRef(shape), " and dtype ", bcx.scalar_type()), dy.sym_sizes(), " and ",
        dy.scalar_type());
    auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
    const Gradients out{
        wanted & core::kWantInput ? like(bcx) : Tensor(), wanted & core::kWantWeight ? like(weight) : Tensor(),
        wanted & core::kWantBias && b.defined() ? like(b) : Tensor()};
    if constexpr (Device::kComputes) {
      if (bcx.is_cpu()) runtime::count_cpu_call();
      if (dy.numel()) {
        Device::backward(causal_conv1d::adjacent_columns(dy), inputs_of(kBackward, bcx, weight, b, ids, ends), out);
      } else {
        for (const Tensor* t : {&out.dweight, &out.dbias}) {
          if (t->defined()) t->zero_();
        }
      }
    }
    return {out.dbcx, out.dweight, out.dbias};
  }

  static void define_backward(torch::Library& m) {
    core::define(
        m,
        "_short_conv_bwd(Tensor dy, Tensor bcx, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, "
        "int wanted) -> (Tensor, Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_short_conv_bwd");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    const Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor bcx = node.take(0), weight = node.take(1), bias = node.take(2), seq_idx = node.take(3),
                 cu_seqlens = node.take(4);
    static const auto op = core::find_op<decltype(bwd<Meta>)>("_short_conv_bwd");
    auto [dbcx, dweight, dbias] = op.call(
        dy, bcx, weight, bias, seq_idx, cu_seqlens, core::wanted_bits(node.needs(0), node.needs(1), node.needs(2)));
    return {dbcx, dweight, dbias};
  }
};

}  // namespace

LIGER_OPERATOR(ShortConv)

}  // namespace liger::ops::short_conv
