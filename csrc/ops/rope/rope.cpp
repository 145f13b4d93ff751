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

using Sections = at::OptionalIntArrayRef;

constexpr const char* kOp = "rope";
constexpr const char* kComplexOp = "rope_freqs_cis";

// ---- Checks

void check_heads(const char* op, const Tensor& q, const Tensor& k) {
  core::check_activation(op, "q", q);
  LIGER_CHECK(q.dim() == 4, op, "q", "have shape (batch, heads, sequence, head size)", q.sym_sizes());
  core::check_same_device(op, "k", k, "q", q);
  core::check_dense(op, "k", k);
  LIGER_CHECK(
      k.scalar_type() == q.scalar_type(), op, "k", c10::str("have the dtype of q, ", q.scalar_type()), k.scalar_type());
  LIGER_CHECK(
      k.dim() == 4 && k.sym_size(0) == q.sym_size(0) && k.sym_size(2) == q.sym_size(2) &&
          k.sym_size(3) == q.sym_size(3),
      op, "k", c10::str("have the batch, sequence and head size of q, ", q.sym_sizes()), k.sym_sizes());
}

// columns_per_angle: 2 for complex angles, which rotate a pair of columns each; 1 if every column has its own angle.
void check_angles(
    const char* op, const char* name, const Tensor& angles, const Tensor& q, bool sections, int64_t columns_per_angle) {
  core::check_same_device(op, name, angles, "q", q);
  LIGER_CHECK(angles.layout() == at::kStrided, op, name, "be a dense tensor", angles.layout());
  int64_t lead = sections ? 1 : 0, dims = angles.dim() - lead;
  LIGER_CHECK(
      (dims == 2 || dims == 3) && (!sections || angles.sym_size(0) == 3), op, name,
      (sections ? "have shape (3, sequence, R) or (3, 1 or batch, sequence, R)"
                : "have shape (sequence, R) or (1 or batch, sequence, R)"),
      angles.sym_sizes());
  LIGER_CHECK(
      angles.sym_size(-2) == q.sym_size(2), op, name,
      c10::str("have one row for each of q's ", q.sym_size(2), " positions"), angles.sym_size(-2));
  LIGER_CHECK(
      dims == 2 || angles.sym_size(lead) == 1 || angles.sym_size(lead) == q.sym_size(0), op, name,
      c10::str("have a batch of 1 or ", q.sym_size(0), ", that of q"), angles.sym_size(lead));
  auto rotated = angles.sym_size(-1) * columns_per_angle;
  LIGER_CHECK(rotated % 2 == 0, op, name, "have an even last dimension", rotated);
  LIGER_CHECK(
      rotated <= q.sym_size(3), op, name, c10::str("rotate at most q's head size, ", q.sym_size(3)), rotated,
      " columns");
}

// sin is absent if cos holds cos + i sin.
void check(const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin, const Sections& sections) {
  if (!sin) {
    check_heads(kComplexOp, q, k);
    auto wanted = q.scalar_type() == at::kDouble ? at::kComplexDouble : at::kComplexFloat;
    LIGER_CHECK(cos.scalar_type() == wanted, kComplexOp, "freqs_cis", c10::str("be ", wanted), cos.scalar_type());
    check_angles(kComplexOp, "freqs_cis", cos, q, false, 2);
    return;
  }
  check_heads(kOp, q, k);
  check_angles(kOp, "cos", cos, q, sections.has_value(), 1);
  LIGER_CHECK(
      cos.scalar_type() == q.scalar_type() || (cos.scalar_type() == at::kFloat && q.scalar_type() != at::kDouble), kOp,
      "cos", c10::str("be float32 or have the dtype of q, ", q.scalar_type()), cos.scalar_type());
  core::check_same(kOp, "sin", *sin, "cos", cos);
  if (sections) {
    bool fits = sections->size() == 3 && (*sections)[0] >= 0 && (*sections)[1] >= 0 && (*sections)[2] >= 0;
    LIGER_CHECK(
        fits && cos.sym_size(-1) == 2 * ((*sections)[0] + (*sections)[1] + (*sections)[2]), kOp, "mrope_section",
        c10::str("be three sizes that add up to ", cos.sym_size(-1), " / 2"), *sections);
  }
}

Angles make_angles(Tensor cos, const OptionalTensor& sin_in, const Sections& sections) {
  bool is_complex = !sin_in;
  if (is_complex) cos = at::view_as_real(cos).flatten(-2);
  Tensor sin = is_complex ? cos : *sin_in;
  bool alike = cos.stride(-1) == 1 && (is_complex || cos.strides() == sin.strides());
  if (!alike) {
    cos = cos.contiguous();
    sin = sin.contiguous();
  }
  int64_t half = cos.size(-1) / 2, lead = sections ? 1 : 0;
  Angles out{cos, sin, half};
  out.position = cos.stride(-2);
  if (cos.dim() - lead == 3 && cos.size(lead) > 1) out.batch = cos.stride(lead);
  if (sections) out.section = cos.stride(0);
  out.section_1 = sections ? (*sections)[0] : half;
  out.section_2 = sections ? (*sections)[0] + (*sections)[1] : half;
  out.is_complex = is_complex;
  return out;
}

// ---- The dispatched ops: rotation by the angles or their inverse, into new tensors or in place

Tensor with_unit_columns(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : core::empty_rows_like(t).copy_(t);
}

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
    rotate(sin ? kOp : kComplexOp, call);
  }
}

template <Rotate* rotate>
std::tuple<Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
    const Sections& sections) {
  check(q, k, cos, sin, sections);
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
  check(dq, dk, cos, sin, sections);
  Tensor out_q = at::empty_strided_symint(dq.sym_sizes(), q_strides, dq.options());
  Tensor out_k = at::empty_strided_symint(dk.sym_sizes(), k_strides, dk.options());
  rotate_into<rotate>(out_q, out_k, dq, dk, cos, sin, interleaved, sections, true);
  return {out_q, out_k};
}

template <Rotate* rotate>
void bwd_(Tensor& dq, Tensor& dk, const Tensor& cos, const OptionalTensor& sin, bool interleaved, Sections sections) {
  check(dq, dk, cos, sin, sections);
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
