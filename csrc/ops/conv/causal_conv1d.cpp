// causal_conv1d(x, weight, bias, activation, *, dilation, seq_idx, cu_seqlens, initial_state)
//     = act(bias + sum over j < W of weight[:, j] * x[:, t - (W - 1 - j) * dilation])
//
// x: (B, S, C) of any strides; a copy is made only if the columns are not adjacent. weight: (C, W) in x's dtype or
// fp32; bias: (C,) in weight's dtype. act: silu or none. initial_state: (B, (W - 1) * dilation, C), the rows before the
// first. Rows of another sample are skipped: those with another number in seq_idx, (B, S), or between other entries of
// cu_seqlens, with B = 1.
//
// Arithmetic is fp32, with one rounding at the end, and one before silu if the weight has x's dtype.
//
// Backward reads x again and recomputes the convolution.

#include "ops/conv/causal_conv1d.h"

#include "core/operator.h"
#include "core/values.h"
#include "runtime/status.h"

namespace liger::ops::causal_conv1d {

using core::value_or_undefined;

namespace {

void check_parameters(const Arguments& a, const c10::SymInt& channels) {
  const char* op = a.op;
  const Tensor &weight = a.weight, bias = value_or_undefined(a.bias);
  core::check_same_device(op, "weight", weight, a.name, a.x);
  core::check_dense(op, "weight", weight);
  core::check_parameter_dtype(op, "weight", weight, a.name, a.x);
  const auto weight_dtype = weight.scalar_type();
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(0) == channels, op, "weight", c10::str("have shape [", channels, ", W]"),
      weight.sym_sizes());
  const auto width = weight.sym_size(1);
  LIGER_CHECK(width >= 2 && width <= kMaxWidth, op, "weight", c10::str("have 2 to ", kMaxWidth, " columns"), width);
  if (bias.defined()) {
    core::check_same_device(op, "bias", bias, a.name, a.x);
    LIGER_CHECK(
        bias.scalar_type() == weight_dtype, op, "bias", c10::str("have the dtype of weight, ", weight_dtype),
        bias.scalar_type());
    LIGER_CHECK(
        bias.dim() == 1 && bias.sym_size(0) == channels, op, "bias", c10::str("have shape [", channels, "]"),
        bias.sym_sizes());
  }
}

void check_samples(const Arguments& a) {
  const char* op = a.op;
  const Tensor &x = a.x, seq_idx = value_or_undefined(a.seq_idx), cu_seqlens = value_or_undefined(a.cu_seqlens);
  if (seq_idx.defined()) {
    core::check_same_device(op, "seq_idx", seq_idx, a.name, x);
    core::check_integers(op, "seq_idx", seq_idx);
    LIGER_CHECK(
        seq_idx.dim() == 2 && seq_idx.sym_sizes().equals(x.sym_sizes().slice(0, 2)), op, "seq_idx",
        c10::str("have shape ", x.sym_sizes().slice(0, 2)), seq_idx.sym_sizes());
  }
  if (cu_seqlens.defined()) {
    LIGER_CHECK(!seq_idx.defined(), op, "cu_seqlens", "be None beside seq_idx", "both");
    core::check_same_device(op, "cu_seqlens", cu_seqlens, a.name, x);
    core::check_integers(op, "cu_seqlens", cu_seqlens);
    LIGER_CHECK(
        cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1, op, "cu_seqlens", "have one dimension, with an entry",
        cu_seqlens.sym_sizes());
    LIGER_CHECK(x.sym_size(0) == 1, op, a.name, "have a batch of 1 beside cu_seqlens", x.sym_sizes());
  }
}

/// A number for each row, the same within a sample: int32, contiguous. Undefined without samples.
Tensor samples_of(const char* op, const Tensor& x, const Tensor& seq_idx, const Tensor& cu_seqlens) {
  if (seq_idx.defined()) {
    // Numbers of more than 32 bits would lose those that tell them apart.
    constexpr int64_t kEnd = int64_t(1) << 31;
    if (seq_idx.scalar_type() == at::kLong) core::check_range(op, "seq_idx", seq_idx, -kEnd, kEnd);
    return seq_idx.to(at::kInt).contiguous();
  }
  if (!cu_seqlens.defined()) return {};
  core::check_ends(op, "cu_seqlens", cu_seqlens, x.size(1));
  const Tensor time = at::arange(x.size(1), cu_seqlens.options());
  return at::searchsorted(cu_seqlens.contiguous(), time, /*out_int32=*/true, /*right=*/true).unsqueeze(0);
}

Tensor contiguous(const OptionalTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); }

}  // namespace

void check(const Arguments& a, const c10::SymInt& channels) {
  const char* op = a.op;
  const Tensor &x = a.x, state = value_or_undefined(a.state);
  check_parameters(a, channels);
  LIGER_CHECK(
      a.activation == "silu" || a.activation == "none", op, "activation", "be 'silu' or 'none'", "'", a.activation,
      "'");
  constexpr int64_t kMaxDilation = int64_t(1) << 24;
  LIGER_CHECK(
      a.dilation >= 1 && a.dilation < kMaxDilation, op, "dilation", "be positive and less than 2^24", a.dilation);
  check_samples(a);
  if (state.defined()) {
    core::check_same_device(op, "initial_state", state, "x", x);
    LIGER_CHECK(
        state.scalar_type() == x.scalar_type(), op, "initial_state", c10::str("have the dtype of x, ", x.scalar_type()),
        state.scalar_type());
    const auto past = (a.weight.sym_size(1) - 1) * a.dilation;
    const c10::SymInt shape[] = {x.sym_size(0), past, channels};
    LIGER_CHECK(
        state.sym_sizes().equals(shape), op, "initial_state", c10::str("have shape ", c10::SymIntArrayRef(shape)),
        state.sym_sizes());
  }
}

void check_gradient(const Arguments& a, const char* name, const Tensor& t, c10::SymIntArrayRef shape) {
  core::check_same_device(a.op, name, t, a.name, a.x);
  core::check_dense(a.op, name, t);
  const auto dtype = a.x.scalar_type();
  LIGER_CHECK(
      t.scalar_type() == dtype && t.sym_sizes().equals(shape), a.op, name,
      c10::str("have shape ", shape, " and dtype ", dtype), t.sym_sizes(), " and ", t.scalar_type());
}

Tensor adjacent_columns(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

Inputs inputs_of(const Arguments& a, const Columns& columns) {
  return {
      a.op,
      a.name,
      adjacent_columns(a.x),
      a.weight.contiguous(),
      contiguous(a.bias),
      samples_of(a.op, a.x, value_or_undefined(a.seq_idx), value_or_undefined(a.cu_seqlens)),
      contiguous(a.state),
      a.dilation,
      a.activation == "silu",
      columns};
}

Gradients gradients_of(const Arguments& a, int64_t wanted) {
  auto like = [&](int gradient, const Tensor& t) {
    return core::wants(wanted, gradient) && t.defined() ? at::empty_symint(t.sym_sizes(), t.options()) : Tensor();
  };
  return {like(0, a.x), like(1, a.weight), like(2, value_or_undefined(a.bias)), like(3, value_or_undefined(a.state))};
}

namespace {

void check_whole(const Arguments& a) {
  core::check_activation(a.op, "x", a.x);
  LIGER_CHECK(a.x.dim() == 3, a.op, "x", "have shape (B, S, C)", a.x.sym_sizes());
  check(a, a.x.sym_size(2));
}

Columns all_columns(const Tensor& x) { return {1, x.size(2), {x.size(2), 0, 0}}; }

struct Backward : core::Private<
                      Backward,
                      Four(
                          const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                          const OptionalTensor&, const OptionalTensor&, int64_t, c10::string_view, int64_t)> {
  static constexpr const char* kName = "_causal_conv1d_bwd";
  static constexpr const char* kArguments =
      "dy, x, weight, bias, seq_idx, cu_seqlens, initial_state, wanted, activation, dilation";

  template <class Device>
  static Four run(
      const Tensor& dy, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
      const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, const OptionalTensor& state, int64_t wanted,
      c10::string_view activation, int64_t dilation) {
    const Arguments a{kBackward, "x", x, weight, bias, seq_idx, cu_seqlens, state, activation, dilation};
    check_whole(a);
    core::check_same(kBackward, "dy", dy, "x", x);
    const Gradients out = gradients_of(a, wanted);
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      if (x.numel()) {
        Device::backward({adjacent_columns(dy)}, inputs_of(a, all_columns(x)), out);
      } else {
        out.zero();
      }
    }
    return {out.dx, out.dweight, out.dbias, out.dstate};
  }
};

struct CausalConv1d : core::Operator<
                          CausalConv1d,
                          Tensor(
                              const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view, int64_t,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)> {
  static constexpr const char* kOp = causal_conv1d::kOp;
  static constexpr const char* kSchema = schemas::causal_conv1d;
  using Edges = core::Positions<0, 1, 2, 7>;
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<5>, core::Argument<6>, core::Argument<7>>;
  using Privates = core::Privates<Backward>;
  using Autocast = core::AutocastLinear<0, 1, 2, 7>;
  using Cpu = causal_conv1d::Cpu;
  using Cuda = causal_conv1d::Cuda;
  using Meta = causal_conv1d::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
      int64_t dilation, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, const OptionalTensor& state) {
    const Arguments a{kOp, "x", x, weight, bias, seq_idx, cu_seqlens, state, activation, dilation};
    check_whole(a);
    Tensor y = at::empty_symint(x.sym_sizes(), x.options());
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      if (x.numel()) Device::forward(inputs_of(a, all_columns(x)), {y});
    }
    return y;
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    const Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const Tensor x = node.take(0), weight = node.take(1), bias = node.take(2), seq_idx = node.take(3),
                 cu_seqlens = node.take(4), state = node.take(5);
    const auto& [activation, dilation] = node.options;
    auto [dx, dweight, dbias, dstate] =
        Backward::call(dy, x, weight, bias, seq_idx, cu_seqlens, state, node.wanted(), activation, dilation);
    return {dx, dweight, dbias, dstate};
  }
};

}  // namespace

LIGER_OPERATOR(CausalConv1d)

}  // namespace liger::ops::causal_conv1d
