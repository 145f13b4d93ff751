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

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

void check_parameters(
    const char* op, const char* name, const Tensor& x, const c10::SymInt& channels, const Tensor& weight,
    const Tensor& bias) {
  core::check_same_device(op, "weight", weight, name, x);
  core::check_dense(op, "weight", weight);
  core::check_parameter_dtype(op, "weight", weight, name, x);
  const auto weight_dtype = weight.scalar_type();
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(0) == channels, op, "weight", c10::str("have shape [", channels, ", W]"),
      weight.sym_sizes());
  const auto width = weight.sym_size(1);
  LIGER_CHECK(width >= 2 && width <= kMaxWidth, op, "weight", c10::str("have 2 to ", kMaxWidth, " columns"), width);
  if (bias.defined()) {
    core::check_same_device(op, "bias", bias, name, x);
    LIGER_CHECK(
        bias.scalar_type() == weight_dtype, op, "bias", c10::str("have the dtype of weight, ", weight_dtype),
        bias.scalar_type());
    LIGER_CHECK(
        bias.dim() == 1 && bias.sym_size(0) == channels, op, "bias", c10::str("have shape [", channels, "]"),
        bias.sym_sizes());
  }
}

void check_samples(const char* op, const char* name, const Tensor& x, const Tensor& seq_idx, const Tensor& cu_seqlens) {
  if (seq_idx.defined()) {
    core::check_same_device(op, "seq_idx", seq_idx, name, x);
    core::check_integers(op, "seq_idx", seq_idx);
    LIGER_CHECK(
        seq_idx.dim() == 2 && seq_idx.sym_sizes().equals(x.sym_sizes().slice(0, 2)), op, "seq_idx",
        c10::str("have shape ", x.sym_sizes().slice(0, 2)), seq_idx.sym_sizes());
  }
  if (cu_seqlens.defined()) {
    LIGER_CHECK(!seq_idx.defined(), op, "cu_seqlens", "be None beside seq_idx", "both");
    core::check_same_device(op, "cu_seqlens", cu_seqlens, name, x);
    core::check_integers(op, "cu_seqlens", cu_seqlens);
    LIGER_CHECK(
        cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1, op, "cu_seqlens", "have one dimension, with an entry",
        cu_seqlens.sym_sizes());
    LIGER_CHECK(x.sym_size(0) == 1, op, name, "have a batch of 1 beside cu_seqlens", x.sym_sizes());
  }
}

void check(
    const char* op, const Tensor& x, const c10::SymInt& columns, const Tensor& weight, const Tensor& bias,
    c10::string_view activation, int64_t dilation, const Tensor& seq_idx, const Tensor& cu_seqlens,
    const Tensor& state) {
  check_parameters(op, "x", x, columns, weight, bias);
  LIGER_CHECK(
      activation == "silu" || activation == "none", op, "activation", "be 'silu' or 'none'", "'", activation, "'");
  constexpr int64_t kMaxDilation = int64_t(1) << 24;
  LIGER_CHECK(dilation >= 1 && dilation < kMaxDilation, op, "dilation", "be positive and less than 2^24", dilation);
  check_samples(op, "x", x, seq_idx, cu_seqlens);
  if (state.defined()) {
    core::check_same_device(op, "initial_state", state, "x", x);
    LIGER_CHECK(
        state.scalar_type() == x.scalar_type(), op, "initial_state", c10::str("have the dtype of x, ", x.scalar_type()),
        state.scalar_type());
    const auto past = (weight.sym_size(1) - 1) * dilation;
    LIGER_CHECK(
        state.dim() == 3 && state.sym_size(0) == x.sym_size(0) && state.sym_size(1) == past &&
            state.sym_size(2) == columns,
        op, "initial_state", c10::str("have shape [", x.sym_size(0), ", ", past, ", ", columns, "]"),
        state.sym_sizes());
  }
}

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

Tensor contiguous(const Tensor& t) { return t.defined() ? t.contiguous() : t; }

Tensor adjacent_columns(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

Inputs inputs_of(
    const char* op, const Tensor& x, const Columns& columns, const Tensor& weight, const Tensor& bias,
    c10::string_view activation, int64_t dilation, const Tensor& seq_idx, const Tensor& cu_seqlens,
    const Tensor& state) {
  return {
      op,
      adjacent_columns(x),
      weight.contiguous(),
      contiguous(bias),
      samples_of(op, x, seq_idx, cu_seqlens),
      contiguous(state),
      dilation,
      activation == "silu",
      columns};
}

namespace {

void check_whole(const char* op, const Tensor& x) {
  core::check_activation(op, "x", x);
  LIGER_CHECK(x.dim() == 3, op, "x", "have shape (B, S, C)", x.sym_sizes());
}

Columns all_columns(const Tensor& x) { return {1, x.size(2), {x.size(2), 0, 0}}; }

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
  using Autocast = core::AutocastLinear<0, 1, 2, 7>;
  using Cpu = causal_conv1d::Cpu;
  using Cuda = causal_conv1d::Cuda;
  using Meta = causal_conv1d::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
      int64_t dilation, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, const OptionalTensor& state) {
    const Tensor b = value_or_undefined(bias), ids = value_or_undefined(seq_idx), ends = value_or_undefined(cu_seqlens),
                 before = value_or_undefined(state);
    check_whole(kOp, x);
    check(kOp, x, x.sym_size(2), weight, b, activation, dilation, ids, ends, before);
    Tensor y = at::empty_symint(x.sym_sizes(), x.options());
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      if (x.numel()) {
        Device::forward(inputs_of(kOp, x, all_columns(x), weight, b, activation, dilation, ids, ends, before), {y});
      }
    }
    return y;
  }

  // ---- Backward

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
      const Tensor& dy, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
      const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, const OptionalTensor& state, int64_t wanted,
      c10::string_view activation, int64_t dilation) {
    const Tensor b = value_or_undefined(bias), ids = value_or_undefined(seq_idx), ends = value_or_undefined(cu_seqlens),
                 before = value_or_undefined(state);
    check_whole(kBackward, x);
    check(kBackward, x, x.sym_size(2), weight, b, activation, dilation, ids, ends, before);
    core::check_same(kBackward, "dy", dy, "x", x);
    auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
    const Gradients out{
        wanted & core::kWantInput ? like(x) : Tensor(), wanted & core::kWantWeight ? like(weight) : Tensor(),
        wanted & core::kWantBias && b.defined() ? like(b) : Tensor(),
        wanted & kWantState && before.defined() ? like(before) : Tensor()};
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      if (x.numel()) {
        const Inputs in = inputs_of(kBackward, x, all_columns(x), weight, b, activation, dilation, ids, ends, before);
        Device::backward({adjacent_columns(dy)}, in, out);
      } else {
        for (const Tensor* t : {&out.dweight, &out.dbias, &out.dstate}) {
          if (t->defined()) t->zero_();
        }
      }
    }
    return {out.dx, out.dweight, out.dbias, out.dstate};
  }

  static void define_backward(torch::Library& m) {
    core::define(
        m,
        "_causal_conv1d_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, "
        "Tensor? initial_state, int wanted, str activation, int dilation) -> (Tensor, Tensor, Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_causal_conv1d_bwd");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    const Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const Tensor x = node.take(0), weight = node.take(1), bias = node.take(2), seq_idx = node.take(3),
                 cu_seqlens = node.take(4), state = node.take(5);
    const auto& [activation, dilation] = node.options;
    const int64_t wanted =
        core::wanted_bits(node.needs(0), node.needs(1), node.needs(2)) | (node.needs(3) ? kWantState : 0);
    static const auto op = core::find_op<decltype(bwd<Meta>)>("_causal_conv1d_bwd");
    auto [dx, dweight, dbias, dstate] =
        op.call(dy, x, weight, bias, seq_idx, cu_seqlens, state, wanted, activation, dilation);
    return {dx, dweight, dbias, dstate};
  }
};

}  // namespace

LIGER_OPERATOR(CausalConv1d)

}  // namespace liger::ops::causal_conv1d
