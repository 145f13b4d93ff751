// rope(q, k, cos, sin, *, interleaved, mrope_section) -> q and k with the first R columns of every head rotated:
// y = x * cos + rotate(x) * sin, where rotate maps a pair (a, b) to (-b, a).
//
// q: (B, Hq, S, D), k: (B, Hk, S, D) of any strides; results and gradients keep q's and k's own dense layouts.
// cos, sin: (S, R) or (1 or B, S, R) in q's dtype or fp32, R <= D; the other columns are copied. Pairs are columns
// (i, i + R / 2), or (2 i, 2 i + 1) if interleaved. With mrope_section = [t, h, w] (multimodal positions,
// t + h + w = R / 2) cos and sin have a leading dimension of 3. The first t pairs use its index 0, the next h pairs
// index 1 and the last w pairs index 2.
//
// rope_freqs_cis(q, k, freqs_cis) takes the angles as complex numbers cos + i sin, (S, R / 2) or (1 or B, S, R / 2).
// Its pairs are neighbouring columns, as in Llama 4.

#include "ops/rope/rope.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "core/rows.h"

namespace liger::ops::rope {
namespace {

constexpr const char* kOp = "rope";
constexpr const char* kComplexOp = "rope_freqs_cis";

const char* name_of(const OptionalTensor& sin) { return sin ? kOp : kComplexOp; }

// ---- The dispatched ops: rotation by the angles or their inverse, into new tensors or in place

template <Rotate* rotate>
void rotate_into(
    const Tensor& out_q, const Tensor& out_k, const Tensor& q, const Tensor& k, const Tensor& cos,
    const OptionalTensor& sin, bool interleaved, const Sections& sections, bool inverse) {
  if constexpr (rotate != nullptr) {
    bool in_place = out_q.is_same(q);
    Call call{
        out_q,
        out_k,
        in_place ? q : with_unit_columns(q),
        in_place ? k : with_unit_columns(k),
        make_angles(cos, sin, sections),
        interleaved || !sin,
        inverse};
    rotate(name_of(sin), call);
  }
}

template <Rotate* rotate>
std::tuple<Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
    const Sections& sections) {
  check_heads_and_angles(name_of(sin), q, k, cos, sin, sections);
  Tensor out_q = core::empty_rows_like(q), out_k = core::empty_rows_like(k);
  rotate_into<rotate>(out_q, out_k, q, k, cos, sin, interleaved, sections, false);
  return {out_q, out_k};
}

template <Rotate* rotate>
std::tuple<Tensor, Tensor> apply(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, Sections sections) {
  return forward<rotate>(q, k, cos, sin, interleaved, sections);
}

template <Rotate* rotate>
std::tuple<Tensor, Tensor> apply_freqs_cis(const Tensor& q, const Tensor& k, const Tensor& freqs_cis) {
  return forward<rotate>(q, k, freqs_cis, std::nullopt, true, std::nullopt);
}

// Gradients have the layouts of the inputs, whatever layouts the incoming gradients have.
template <Rotate* rotate>
std::tuple<Tensor, Tensor> bwd(
    const Tensor& dq, const Tensor& dk, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
    Sections sections, c10::SymIntArrayRef q_strides, c10::SymIntArrayRef k_strides) {
  check_heads_and_angles(name_of(sin), dq, dk, cos, sin, sections);
  Tensor out_q = at::empty_strided_symint(dq.sym_sizes(), q_strides, dq.options());
  Tensor out_k = at::empty_strided_symint(dk.sym_sizes(), k_strides, dk.options());
  rotate_into<rotate>(out_q, out_k, dq, dk, cos, sin, interleaved, sections, true);
  return {out_q, out_k};
}

template <Rotate* rotate>
void bwd_(Tensor& dq, Tensor& dk, const Tensor& cos, const OptionalTensor& sin, bool interleaved, Sections sections) {
  check_heads_and_angles(name_of(sin), dq, dk, cos, sin, sections);
  rotate_into<rotate>(dq, dk, dq, dk, cos, sin, interleaved, sections, true);
}

// ---- Autograd

struct RopeBackward : core::BackwardNode<RopeBackward, 2> {  // cos, sin
  bool interleaved = false;
  std::vector<int64_t> sections;  // empty: none
  std::vector<c10::SymInt> q_strides, k_strides;
  const char* op = kOp;

  auto state() { return std::tie(interleaved, sections, q_strides, k_strides, op); }
  std::string name() const override { return op; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dq = std::move(grads[0]), dk = std::move(grads[1]);
    bool needs_q = dq.defined() && needs(0), needs_k = dk.defined() && needs(1);
    if (!needs_q && !needs_k) return {Tensor(), Tensor()};
    Tensor cos = take(0), sin_or_none = take(1);
    OptionalTensor sin = sin_or_none.defined() ? OptionalTensor(sin_or_none) : std::nullopt;
    Sections given = sections.empty() ? Sections() : Sections(sections);
    if (needs_q && needs_k && may_overwrite(dq, dq) && may_overwrite(dk, dk) && dq.sym_strides().equals(q_strides) &&
        dk.sym_strides().equals(k_strides)) {
      static const auto in_place = core::find_op<decltype(bwd_<rotate_cpu>)>("liger::_rope_bwd_");
      in_place.call(dq, dk, cos, sin, interleaved, given);
      return {dq, dk};
    }
    // A gradient that is not needed is replaced by a tensor without heads.
    if (!needs_q) dq = dk.narrow(1, 0, 0);
    if (!needs_k) dk = dq.narrow(1, 0, 0);
    static const auto out_of_place = core::find_op<decltype(bwd<rotate_cpu>)>("liger::_rope_bwd");
    auto [out_q, out_k] = out_of_place.call(dq, dk, cos, sin, interleaved, given, q_strides, k_strides);
    return {needs_q ? out_q : Tensor(), needs_k ? out_k : Tensor()};
  }
};

// forward: the public op, called below autograd.
template <class Forward>
std::tuple<Tensor, Tensor> differentiable(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
    const Sections& sections, const Forward& forward) {
  core::check_dense(op, "q", q);
  core::check_dense(op, "k", k);
  core::check_dense(op, sin ? "cos" : "freqs_cis", cos);
  core::check_dense(op, "sin", sin);
  core::check_no_forward_ad(op, q, k, cos, sin);
  LIGER_CHECK(
      !torch::autograd::compute_requires_grad(cos, sin), op, (sin ? "cos and sin" : "freqs_cis"), "require no gradient",
      "requires_grad=True");
  Tensor out_q, out_k;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(out_q, out_k) = forward();
  }
  if (torch::autograd::compute_requires_grad(q, k)) {
    auto node = core::make_node<RopeBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k));
    node->op = op;
    node->interleaved = interleaved;
    if (sections) node->sections = sections->vec();
    node->q_strides = out_q.sym_strides().vec();
    node->k_strides = out_k.sym_strides().vec();
    node->saved = {core::SavedVariable(cos, false), core::SavedVariable(sin, false)};
    torch::autograd::set_history(out_q, node);
    torch::autograd::set_history(out_k, node);
  }
  return {out_q, out_k};
}

std::tuple<Tensor, Tensor> rope_autograd(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, Sections sections) {
  static const auto op = core::find_op<decltype(apply<rotate_cpu>)>("liger::rope");
  return differentiable(
      kOp, q, k, cos, sin, interleaved, sections, [&] { return op.call(q, k, cos, sin, interleaved, sections); });
}

std::tuple<Tensor, Tensor> rope_freqs_cis_autograd(const Tensor& q, const Tensor& k, const Tensor& freqs_cis) {
  static const auto op = core::find_op<decltype(apply_freqs_cis<rotate_cpu>)>("liger::rope_freqs_cis");
  return differentiable(
      kComplexOp, q, k, freqs_cis, std::nullopt, true, std::nullopt, [&] { return op.call(q, k, freqs_cis); });
}

// Multiplication promotes mixed dtypes, with autocast and without. This op requires one dtype for q and k, and angles
// in that dtype or float32.
template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> rope_autocast(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, Sections sections) {
  static const auto op = core::find_op<decltype(apply<rotate_cpu>)>("liger::rope");
  c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  auto wider = at::promote_types(q.scalar_type(), k.scalar_type());
  auto angle = [&](const Tensor& t) { return t.scalar_type() == wider ? t : t.to(at::kFloat); };
  return op.call(q.to(wider), k.to(wider), angle(cos), angle(sin), interleaved, sections);
}

template <Rotate* rotate>
void implement(torch::Library& m) {
  core::implement<apply<rotate>>(m, "rope");
  core::implement<apply_freqs_cis<rotate>>(m, "rope_freqs_cis");
  core::implement<bwd<rotate>>(m, "_rope_bwd");
  core::implement<bwd_<rotate>>(m, "_rope_bwd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(
      m,
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False, int[]? mrope_section=None) -> "
      "(Tensor, Tensor)");
  core::define(m, "rope_freqs_cis(Tensor q, Tensor k, Tensor freqs_cis) -> (Tensor, Tensor)");
  core::define(
      m,
      "_rope_bwd(Tensor dq, Tensor dk, Tensor cos, Tensor? sin, bool interleaved, int[]? mrope_section, SymInt[] "
      "q_strides, SymInt[] k_strides) -> (Tensor, Tensor)");
  core::define(
      m,
      "_rope_bwd_(Tensor(a!) dq, Tensor(b!) dk, Tensor cos, Tensor? sin, bool interleaved, int[]? mrope_section) -> "
      "()");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<rotate_cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<rotate_cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<nullptr>(m); }

TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("rope", rope_autograd);
  m.impl("rope_freqs_cis", rope_freqs_cis_autograd);
}

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<rope_autocast<c10::DeviceType::CUDA>>(m, "rope"); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { core::implement<rope_autocast<c10::DeviceType::CPU>>(m, "rope"); }

}  // namespace liger::ops::rope
