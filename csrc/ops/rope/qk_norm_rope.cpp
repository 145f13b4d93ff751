// qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, *, interleaved, mrope_section)
//     = rope(rms_norm(q, q_weight, ...), rms_norm(k, k_weight, ...), cos, sin, ...)
//
// Every head of q and k is one row of the norm. q: (B, Hq, S, D), k: (B, Hk, S, D), cos, sin and their options: as in
// rope. q_weight, k_weight: (D,) in q's dtype or fp32, both in the same. eps, offset, casting_mode: as in rms_norm.
//
// As the two operators do, forward rounds the norm's result to q's dtype before it is rotated. Backward does not round
// between its two steps. It reads q and k again and recomputes the statistics, so forward saves inputs only.

#include "ops/rope/qk_norm_rope.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/casting_mode.h"
#include "core/memory.h"
#include "core/registration.h"
#include "core/rows.h"

namespace liger::ops::qk_norm_rope {
namespace {

using core::value_or_undefined;
using rope::OptionalTensor;
using rope::Sections;

struct Meta {
  static void forward(const Forward&) {}
  static WeightGradients backward(const Backward& call) {
    auto gradient = [&](const Tensor& w) { return call.needs_weights && w.defined() ? at::empty_like(w) : Tensor(); };
    return {gradient(call.q_weight), gradient(call.k_weight)};
  }
};

// ---- Arguments

struct Options {
  double eps, offset;
  c10::string_view casting_mode;
  bool interleaved;
  Sections sections;
};

void check(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
    const Tensor& sin, const Options& options) {
  rope::check_heads_and_angles(op, q, k, cos, sin, options.sections);
  if (q_weight.defined()) core::check_column_parameter(op, "q_weight", q_weight, q, "q");
  if (k_weight.defined()) core::check_column_parameter(op, "k_weight", k_weight, k, "k");
  if (q_weight.defined() && k_weight.defined()) {
    LIGER_CHECK(
        k_weight.scalar_type() == q_weight.scalar_type(), op, "k_weight",
        c10::str("have the dtype of q_weight, ", q_weight.scalar_type()), k_weight.scalar_type());
  }
  core::check_eps(op, options.eps);
  core::check_casting_mode(op, options.casting_mode);
}

template <class Device>
Forward describe(
    const Tensor& out_q, const Tensor& out_k, const Tensor& q, const Tensor& k, const Tensor& q_weight,
    const Tensor& k_weight, const Tensor& cos, const Tensor& sin, const Options& options) {
  Forward out{out_q, out_k, q, k, q_weight, k_weight, {}, options.eps, options.offset};
  out.round_first = core::rounds_first(options.casting_mode);
  out.interleaved = options.interleaved;
  if constexpr (!std::is_same_v<Device, Meta>) {
    out.q = rope::with_unit_columns(q);
    out.k = rope::with_unit_columns(k);
    if (q_weight.defined()) out.q_weight = q_weight.contiguous();
    if (k_weight.defined()) out.k_weight = k_weight.contiguous();
    out.angles = rope::make_angles(cos, sin, options.sections);
  }
  return out;
}

// ---- The dispatched operators

template <class Device>
std::tuple<Tensor, Tensor> apply(
    const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos,
    const Tensor& sin, double eps, double offset, c10::string_view casting_mode, bool interleaved, Sections sections) {
  const Options options{eps, offset, casting_mode, interleaved, sections};
  Tensor wq = value_or_undefined(q_weight), wk = value_or_undefined(k_weight);
  check(kOp, q, k, wq, wk, cos, sin, options);
  Tensor out_q = core::empty_rows_like(q), out_k = core::empty_rows_like(k);
  Device::forward(describe<Device>(out_q, out_k, q, k, wq, wk, cos, sin, options));
  return {out_q, out_k};
}

template <class Device>
WeightGradients differentiate(
    const Tensor& out_q, const Tensor& out_k, const Tensor& grad_q, const Tensor& grad_k, const Tensor& q,
    const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos,
    const Tensor& sin, int64_t wanted, const Options& options) {
  Tensor wq = value_or_undefined(q_weight), wk = value_or_undefined(k_weight);
  check(kBackward, q, k, wq, wk, cos, sin, options);
  core::check_same(kBackward, "grad_q", grad_q, "q", q);
  core::check_same(kBackward, "grad_k", grad_k, "k", k);
  Backward call{describe<Device>(out_q, out_k, q, k, wq, wk, cos, sin, options), grad_q, grad_k};
  call.needs_weights = (wanted & core::kWantWeight) != 0;
  if constexpr (!std::is_same_v<Device, Meta>) {
    call.grad_q = rope::with_unit_columns(grad_q);
    call.grad_k = rope::with_unit_columns(grad_k);
  }
  return Device::backward(call);
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
    const Tensor& grad_q, const Tensor& grad_k, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, int64_t wanted, double eps, double offset,
    c10::string_view casting_mode, bool interleaved, Sections sections) {
  const bool needs_heads = (wanted & core::kWantInput) != 0;
  Tensor out_q = needs_heads ? core::empty_rows_like(q) : Tensor();
  Tensor out_k = needs_heads ? core::empty_rows_like(k) : Tensor();
  auto [dq_weight, dk_weight] = differentiate<Device>(
      out_q, out_k, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted,
      {eps, offset, casting_mode, interleaved, sections});
  return {out_q, out_k, dq_weight, dk_weight};
}

// Overwrites the incoming gradients with those of q and k.
template <class Device>
WeightGradients bwd_(
    Tensor& grad_q, Tensor& grad_k, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, int64_t wanted, double eps, double offset,
    c10::string_view casting_mode, bool interleaved, Sections sections) {
  return differentiate<Device>(
      grad_q, grad_k, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted,
      {eps, offset, casting_mode, interleaved, sections});
}

// ---- Autograd

struct Node : core::BackwardNode<Node, 6> {  // q, k, q_weight, k_weight, cos, sin
  double eps, offset;
  std::string casting_mode;
  bool interleaved;
  std::vector<int64_t> sections;  // empty: none

  auto state() { return std::tie(eps, offset, casting_mode, interleaved, sections); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad_q = std::move(grads[0]), grad_k = std::move(grads[1]);
    const bool has_q = grad_q.defined() && (needs(0) || needs(2)), has_k = grad_k.defined() && (needs(1) || needs(3));
    if (!has_q && !has_k) return {Tensor(), Tensor(), Tensor(), Tensor()};
    Tensor q = take(0), k = take(1), q_weight = take(2), k_weight = take(3), cos = take(4), sin = take(5);
    const bool heads = (has_q && needs(0)) || (has_k && needs(1));
    const int64_t wanted = core::wanted_bits(heads, (has_q && needs(2)) || (has_k && needs(3)));
    const Sections given = sections.empty() ? Sections() : Sections(sections);
    Tensor dq_weight, dk_weight;
    if (heads && has_q && has_k && may_overwrite(grad_q, q) && may_overwrite(grad_k, k)) {
      static const auto in_place = core::find_op<decltype(bwd_<Meta>)>("liger::_qk_norm_rope_bwd_");
      std::tie(dq_weight, dk_weight) = in_place.call(
          grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, eps, offset, casting_mode, interleaved, given);
    } else {
      // Heads without a gradient are replaced by a tensor without heads.
      if (!has_q) grad_q = q = k.narrow(1, 0, 0);
      if (!has_k) grad_k = k = q.narrow(1, 0, 0);
      static const auto out_of_place = core::find_op<decltype(bwd<Meta>)>("liger::_qk_norm_rope_bwd");
      std::tie(grad_q, grad_k, dq_weight, dk_weight) = out_of_place.call(
          grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, eps, offset, casting_mode, interleaved, given);
    }
    return {
        has_q && needs(0) ? grad_q : Tensor(), has_k && needs(1) ? grad_k : Tensor(),
        has_q && needs(2) ? dq_weight : Tensor(), has_k && needs(3) ? dk_weight : Tensor()};
  }
};

std::tuple<Tensor, Tensor> autograd(
    const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos,
    const Tensor& sin, double eps, double offset, c10::string_view casting_mode, bool interleaved, Sections sections) {
  core::check_dense(kOp, "q", q);
  core::check_dense(kOp, "k", k);
  core::check_dense(kOp, "q_weight", q_weight);
  core::check_dense(kOp, "k_weight", k_weight);
  core::check_dense(kOp, "cos", cos);
  core::check_dense(kOp, "sin", sin);
  core::check_no_forward_ad(kOp, q, k, q_weight, k_weight, cos, sin);
  LIGER_CHECK(
      !torch::autograd::compute_requires_grad(cos, sin), kOp, "cos and sin", "require no gradient",
      "requires_grad=True");
  Tensor out_q, out_k;
  {
    static const auto op = core::find_op<decltype(apply<Meta>)>("liger::qk_norm_rope");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(out_q, out_k) =
        op.call(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, interleaved, sections);
  }
  if (torch::autograd::compute_requires_grad(q, k, q_weight, k_weight)) {
    auto node = core::make_node<Node>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, q_weight, k_weight));
    node->eps = eps;
    node->offset = offset;
    node->casting_mode = casting_mode;
    node->interleaved = interleaved;
    if (sections) node->sections = sections->vec();
    node->saved = {core::SavedVariable(q, false),        core::SavedVariable(k, false),
                   core::SavedVariable(q_weight, false), core::SavedVariable(k_weight, false),
                   core::SavedVariable(cos, false),      core::SavedVariable(sin, false)};
    torch::autograd::set_history(out_q, node);
    torch::autograd::set_history(out_k, node);
  }
  return {out_q, out_k};
}

// As rope's: mixed dtypes are promoted. Unlike rms_norm's autocast on CUDA, half precision stays, for attention casts q
// and k to it anyway.
template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> autocast(
    const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos,
    const Tensor& sin, double eps, double offset, c10::string_view casting_mode, bool interleaved, Sections sections) {
  static const auto op = core::find_op<decltype(apply<Meta>)>("liger::qk_norm_rope");
  c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto wider = at::promote_types(q.scalar_type(), k.scalar_type());
  auto is_wider = [&](const Tensor& t) { return t.scalar_type() == wider; };
  auto angle = [&](const Tensor& t) { return is_wider(t) ? t : t.to(at::kFloat); };
  auto present = [](const OptionalTensor& w) { return w && w->defined(); };
  const bool keep = (!present(q_weight) || is_wider(*q_weight)) && (!present(k_weight) || is_wider(*k_weight));
  auto weight = [&](const OptionalTensor& w) { return present(w) && !keep ? OptionalTensor(w->to(at::kFloat)) : w; };
  return op.call(
      q.to(wider), k.to(wider), weight(q_weight), weight(k_weight), angle(cos), angle(sin), eps, offset, casting_mode,
      interleaved, sections);
}

template <class Device>
void implement(torch::Library& m) {
  core::implement<apply<Device>>(m, "qk_norm_rope");
  core::implement<bwd<Device>>(m, "_qk_norm_rope_bwd");
  core::implement<bwd_<Device>>(m, "_qk_norm_rope_bwd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(
      m,
      "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps=1e-6, "
      "float offset=0.0, str casting_mode=\"llama\", *, bool interleaved=False, int[]? mrope_section=None) -> "
      "(Tensor, Tensor)");
  core::define(
      m,
      "_qk_norm_rope_bwd(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, "
      "Tensor cos, Tensor sin, int wanted, float eps, float offset, str casting_mode, bool interleaved, "
      "int[]? mrope_section) -> (Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_qk_norm_rope_bwd_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor q, Tensor k, Tensor? q_weight, "
      "Tensor? k_weight, Tensor cos, Tensor sin, int wanted, float eps, float offset, str casting_mode, "
      "bool interleaved, int[]? mrope_section) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("qk_norm_rope", autograd); }
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<autocast<c10::DeviceType::CUDA>>(m, "qk_norm_rope"); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { core::implement<autocast<c10::DeviceType::CPU>>(m, "qk_norm_rope"); }

}  // namespace liger::ops::qk_norm_rope
