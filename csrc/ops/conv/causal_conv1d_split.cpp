// causal_conv1d_split(x, weight, bias, activation, *, sizes, groups, dilation, seq_idx, cu_seqlens, initial_state)
//     = q, k, v, z, where cat(q, k, v) = causal_conv1d(cat of their columns of x, weight, bias, activation, ...)
//
// x: (B, S, C), with groups of columns [q, k, v, z], as wide as `sizes` says. q, k, v: (B, S, groups * size), new
// tensors. z: (B, S, groups, size), a view of x that is not convolved. weight, bias, initial_state: of all channels of
// q, then those of k, then those of v. Other arguments: as in causal_conv1d.
//
// Backward writes the gradients of all four results into one tensor. As a view of x, z would have a gradient of its own
// as wide as x, which autograd would add: so z is made an output of the convolution's node.

#include <algorithm>
#include <numeric>

#include "core/operator.h"
#include "ops/conv/causal_conv1d.h"
#include "runtime/status.h"

namespace liger::ops::causal_conv1d_split {

namespace {

using namespace causal_conv1d;
using at::IntArrayRef;
using core::value_or_undefined;

constexpr const char* kOp = "causal_conv1d_split";
constexpr const char* kBackward = "causal_conv1d_split backward";

Columns check(const Arguments& a, IntArrayRef sizes, int64_t groups) {
  const char* op = a.op;
  const Tensor& x = a.x;
  core::check_activation(op, "x", x);
  LIGER_CHECK(x.dim() == 3, op, "x", "have shape (B, S, C)", x.sym_sizes());
  const bool positive = std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; });
  LIGER_CHECK(
      (sizes.size() == kParts || sizes.size() == kParts + 1) && positive, op, "sizes",
      "be 3 or 4 numbers of columns: of q, k, v and z", sizes);
  LIGER_CHECK(groups >= 1, op, "groups", "be positive", groups);
  const Columns columns{
      groups, std::accumulate(sizes.begin(), sizes.end(), int64_t(0)), {sizes[0], sizes[1], sizes[2]}};
  LIGER_CHECK(
      x.sym_size(2) == groups * columns.pitch, op, "x",
      c10::str("have groups * sum(sizes) = ", groups * columns.pitch, " columns"), x.sym_sizes());
  causal_conv1d::check(a, groups * columns.convolved());
  return columns;
}

/// The columns of t that are not convolved: (B, S, groups, size).
Tensor rest_of(const Tensor& t, const Columns& columns) {
  return t.unflatten(2, {columns.groups, columns.pitch})
      .narrow(3, columns.convolved(), columns.pitch - columns.convolved());
}

/// torch copies strided rows element by element: elements of 8 bytes are fewer.
void copy_rows(const Tensor& to, const Tensor& from) {
  const int64_t count = 8 / to.element_size();
  auto fits = [&](const Tensor& t) {
    const auto strides = t.strides();
    return t.stride(-1) == 1 && t.size(-1) % count == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 8 == 0 &&
        t.storage_offset() % count == 0 &&
        std::all_of(strides.begin(), strides.end() - 1, [&](int64_t stride) { return stride % count == 0; });
  };
  if (count > 1 && fits(to) && fits(from)) {
    to.view(at::kLong).copy_(from.view(at::kLong));
  } else {
    to.copy_(from);
  }
}

// Upstream gradients that are undefined are zero.
struct Backward
    : core::Private<
          Backward,
          Four(
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
              const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
              int64_t, IntArrayRef, int64_t, c10::string_view, int64_t)> {
  static constexpr const char* kName = "_causal_conv1d_split_bwd";
  static constexpr const char *kPublic = schemas::causal_conv1d_split,
                              *kArguments =
                                  "dq, dk, dv, dz, x...bias, seq_idx..., wanted, sizes, groups, activation, dilation";

  template <class Device>
  static Four run(
      const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv, const OptionalTensor& dz_given,
      const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
      const OptionalTensor& cu_seqlens, const OptionalTensor& state, int64_t wanted, IntArrayRef sizes, int64_t groups,
      c10::string_view activation, int64_t dilation) {
    const Arguments a{kBackward, "x", x, weight, bias, seq_idx, cu_seqlens, state, activation, dilation};
    const Columns columns = check(a, sizes, groups);
    Parts dy{value_or_undefined(dq), value_or_undefined(dk), value_or_undefined(dv)};
    const Tensor dz = value_or_undefined(dz_given);
    constexpr const char* kNames[] = {"dq", "dk", "dv"};
    const auto batch = x.sym_size(0), length = x.sym_size(1);
    for (size_t i = 0; i < kParts; ++i) {
      if (dy[i].defined()) check_gradient(a, kNames[i], dy[i], {batch, length, columns.part(i)});
    }
    const int64_t rest = columns.pitch - columns.convolved();
    if (dz.defined()) check_gradient(a, "dz", dz, {batch, length, groups, rest});
    const Gradients out = gradients_of(a, wanted);
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      const bool any = std::any_of(dy.begin(), dy.end(), [](const Tensor& t) { return t.defined(); });
      if (x.numel() && columns.convolved() && any) {
        for (size_t i = 0; i < kParts; ++i) {
          dy[i] = dy[i].defined() ? adjacent_columns(dy[i])
                                  : at::zeros({x.size(0), x.size(1), columns.part(i)}, x.options());
        }
        Device::backward(dy, inputs_of(a, columns), out);
      } else {
        out.zero();
      }
      if (out.dx.defined() && out.dx.numel() && rest) {
        const Tensor to = rest_of(out.dx, columns);
        dz.defined() ? copy_rows(to, dz) : void(to.zero_());
      }
    }
    return {out.dx, out.dweight, out.dbias, out.dstate};
  }
};

/// The convolution: (q, k, v).
struct Convolution
    : core::Operator<
          Convolution,
          Three(
              const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
              const OptionalTensor&, IntArrayRef, int64_t, c10::string_view, int64_t)> {
  static constexpr const char* kOp = "_causal_conv1d_split_fwd";
  struct Node;
  using Edges = core::Positions<0, 1, 2, 5>;
  using Differentiable = core::Positions<0, 1, 2>;
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<5>>;
  using Privates = core::Privates<Backward>;
  using Cpu = causal_conv1d::Cpu;
  using Cuda = causal_conv1d::Cuda;
  using Meta = causal_conv1d::Meta;

  // Not by core::define: private operators of others have no gradient.
  static void define(torch::Library& m) {
    m.def(
        torch::schema(
            "_causal_conv1d_split_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? cu_seqlens, "
            "Tensor? initial_state, int[] sizes, int groups, str activation, int dilation) -> "
            "(Tensor, Tensor, Tensor)"),
        {at::Tag::pt2_compliant_tag});
    Privates::define(m);
  }

  template <class Device>
  static Three run(
      bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
      const OptionalTensor& cu_seqlens, const OptionalTensor& state, IntArrayRef sizes, int64_t groups,
      c10::string_view activation, int64_t dilation) {
    const Arguments a{causal_conv1d_split::kOp, "x", x, weight, bias, seq_idx, cu_seqlens, state, activation, dilation};
    const Columns columns = check(a, sizes, groups);
    auto part = [&](size_t i) {
      return at::empty_symint({x.sym_size(0), x.sym_size(1), columns.part(i)}, x.options());
    };
    const Parts y{part(0), part(1), part(2)};
    if constexpr (Device::kComputes) {
      if (x.is_cpu()) runtime::count_cpu_call();
      if (x.numel() && columns.convolved()) Device::forward(inputs_of(a, columns), y);
    }
    return {y[0], y[1], y[2]};
  }

  static core::variable_list backward(core::OperatorNode<Convolution>& node, core::variable_list&& grads) {
    const Tensor dq = std::move(grads[0]), dk = std::move(grads[1]), dv = std::move(grads[2]);
    // z, where it is an output of this node.
    const Tensor dz = grads.size() > kParts ? std::move(grads[kParts]) : Tensor();
    const bool convolved = dq.defined() || dk.defined() || dv.defined();
    if (!convolved && !dz.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const Tensor x = node.take(0), weight = node.take(1), bias = node.take(2), seq_idx = node.take(3),
                 cu_seqlens = node.take(4), state = node.take(5);
    const auto& [sizes, groups, activation, dilation] = node.options;
    auto [dx, dweight, dbias, dstate] = Backward::call(
        dq, dk, dv, dz, x, weight, bias, seq_idx, cu_seqlens, state,
        convolved ? node.wanted() : core::wanted_bits(node.needs(0)), sizes, groups, activation, dilation);
    return {dx, dweight, dbias, dstate};
  }
};

struct Convolution::Node : core::OperatorNode<Convolution> {
  std::string name() const override { return causal_conv1d_split::kOp; }
};

// ---- The operator

Four split(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation, IntArrayRef sizes,
    int64_t groups, int64_t dilation, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
    const OptionalTensor& state) {
  core::check_no_forward_ad(kOp, x, weight, bias, state);
  auto [q, k, v] =
      Convolution::handle().call(x, weight, bias, seq_idx, cu_seqlens, state, sizes, groups, activation, dilation);
  const int64_t pitch = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
  Tensor z = rest_of(x, {groups, pitch, {sizes[0], sizes[1], sizes[2]}});
  // Not where something traces above autograd: there, the view has its own gradient.
  const auto& node = q.grad_fn();
  if (z.requires_grad() && dynamic_cast<Convolution::Node*>(node.get())) {
    torch::autograd::set_history(z, node);
    if (auto* view = torch::autograd::impl::get_view_autograd_meta(z)) {
      view->set_creation_meta(torch::autograd::CreationMeta::MULTI_OUTPUT_NODE);
    }
  }
  return {q, k, v, z};
}

template <c10::DeviceType kDevice>
Four cast(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation, IntArrayRef sizes,
    int64_t groups, int64_t dilation, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
    const OptionalTensor& state) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto arguments = std::make_tuple(x, weight, bias, state);
  core::AutocastLinear<0, 1, 2, 3>::cast(kDevice, arguments);
  const auto& [wide_x, wide_weight, wide_bias, wide_state] = arguments;
  static const auto op = core::find_op<decltype(split)>(kOp);
  return op.call(wide_x, wide_weight, wide_bias, activation, sizes, groups, dilation, seq_idx, cu_seqlens, wide_state);
}

}  // namespace

LIGER_OPERATOR(Convolution)

LIGER_LIBRARY_FRAGMENT(m) { core::define(m, schemas::causal_conv1d_split); }
LIGER_LIBRARY_IMPL(CompositeImplicitAutograd, m) { m.impl(kOp, split); }
// torch's fallbacks of these keys take no views.
LIGER_LIBRARY_IMPL(Functionalize, m) { m.impl(kOp, split); }
LIGER_LIBRARY_IMPL(FuncTorchBatchedDecomposition, m) { m.impl(kOp, split); }
LIGER_LIBRARY_IMPL(AutocastCUDA, m) { core::implement<cast<c10::DeviceType::CUDA>>(m, kOp); }
LIGER_LIBRARY_IMPL(AutocastCPU, m) { core::implement<cast<c10::DeviceType::CPU>>(m, kOp); }

}  // namespace liger::ops::causal_conv1d_split
