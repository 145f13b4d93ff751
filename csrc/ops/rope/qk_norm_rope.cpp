// qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, *, interleaved, mrope_section)
//     = rope(rms_norm(q, q_weight, ...), rms_norm(k, k_weight, ...), cos, sin, ...)
//
// Every head of q and k is one row of the norm. q: (B, Hq, S, D), k: (B, Hk, S, D), cos, sin and their options: as in
// rope. q_weight, k_weight: (D,) in q's dtype or fp32, both in the same. eps, offset, casting_mode: as in rms_norm.
//
// As the two operators do, forward rounds the norm's result to q's dtype before it is rotated. Backward does not round
// between its two steps. It reads q and k again and recomputes the statistics, so forward saves inputs only.

#include "ops/rope/qk_norm_rope.h"

#include "core/casting_mode.h"
#include "core/operator.h"
#include "core/rows/rows.h"

namespace liger::ops::qk_norm_rope {
namespace {

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

template <class Device>
Forward describe(
    const char* op, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    const Tensor& cos, const Tensor& sin, const Options& options) {
  Tensor wq = core::value_or_undefined(q_weight), wk = core::value_or_undefined(k_weight);
  rope::check_heads_and_angles(op, q, k, cos, sin, options.sections, {});
  if (wq.defined()) core::check_column_parameter(op, "q_weight", wq, q, "q");
  if (wk.defined()) core::check_column_parameter(op, "k_weight", wk, k, "k");
  if (wq.defined() && wk.defined()) {
    LIGER_CHECK(
        wk.scalar_type() == wq.scalar_type(), op, "k_weight",
        c10::str("have the dtype of q_weight, ", wq.scalar_type()), wk.scalar_type());
  }
  core::check_eps(op, options.eps);
  core::check_casting_mode(op, options.casting_mode);
  const bool round_first = core::rounds_first(options.casting_mode);
  Forward out{{.q = q, .k = k}, wq, wk, options.eps, options.offset, round_first, options.interleaved};
  if constexpr (!std::is_same_v<Device, Meta>) {
    out.q = rope::with_unit_columns(q);
    out.k = rope::with_unit_columns(k);
    if (wq.defined()) out.q_weight = wq.contiguous();
    if (wk.defined()) out.k_weight = wk.contiguous();
    out.angles = rope::make_angles(cos, sin, options.sections, {options.interleaved});
  }
  return out;
}

// ---- Backward

// Bits of `wanted`, whose order is q, k, q_weight, k_weight.
constexpr int64_t kOfQ = 0b0101, kOfK = 0b1010, kOfHeads = 0b0011, kOfWeights = 0b1100;

struct Gradient
    : core::Private<
          Gradient,
          std::tuple<Tensor, Tensor, Tensor, Tensor>(
              const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
              const Tensor&, const Tensor&, int64_t, double, double, c10::string_view, bool, Sections),
          core::Overwrites<0, 1>> {
  static constexpr const char* kName = "_qk_norm_rope_bwd";
  static constexpr const char* kArguments =
      "grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, eps, offset, casting_mode, interleaved, "
      "mrope_section";

  /// The gradients of q and k are computed together, and so are those of the weights.
  template <class Device, class... O>
  static std::tuple<Tensor, Tensor, Tensor, Tensor> run(
      const Into& into, const Tensor& grad_q, const Tensor& grad_k, const Tensor& q, const Tensor& k,
      const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
      int64_t wanted, O... options) {
    Backward call{describe<Device>(kBackward, q, k, q_weight, k_weight, cos, sin, {options...}), grad_q, grad_k};
    core::check_same(kBackward, "grad_q", grad_q, "q", q);
    core::check_same(kBackward, "grad_k", grad_k, "k", k);
    if constexpr (!std::is_same_v<Device, Meta>) {
      call.grad_q = rope::with_unit_columns(grad_q);
      call.grad_k = rope::with_unit_columns(grad_k);
    }
    const bool allocates = (wanted & kOfHeads) && !into[0].defined();
    call.out_q = allocates ? core::empty_rows_like(q) : into[0];
    call.out_k = allocates ? core::empty_rows_like(k) : into[1];
    call.needs_weights = wanted & kOfWeights;
    auto [dq_weight, dk_weight] = Device::backward(call);
    auto if_wanted = [&](int i, const Tensor& gradient) { return core::wants(wanted, i) ? gradient : Tensor(); };
    return {if_wanted(0, call.out_q), if_wanted(1, call.out_k), if_wanted(2, dq_weight), if_wanted(3, dk_weight)};
  }
};

// ---- The operator

struct QkNormRope : core::Operator<
                        QkNormRope,
                        std::tuple<Tensor, Tensor>(
                            const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                            const Tensor&, double, double, c10::string_view, bool, Sections)> {
  static constexpr const char* kOp = qk_norm_rope::kOp;
  static constexpr const char* kSchema = schemas::qk_norm_rope;
  using Edges = core::Positions<0, 1, 2, 3>;
  using Constants = core::Positions<4, 5>;
  using Differentiable = core::Positions<0, 1>;
  using Privates = core::Privates<Gradient>;
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<5>>;
  using Cpu = qk_norm_rope::Cpu;
  using Cuda = qk_norm_rope::Cuda;
  using Meta = qk_norm_rope::Meta;

  template <class Device, class... O>
  static std::tuple<Tensor, Tensor> run(
      bool, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
      const Tensor& cos, const Tensor& sin, O... options) {
    auto call = describe<Device>(kOp, q, k, q_weight, k_weight, cos, sin, {options...});
    call.out_q = core::empty_rows_like(q);
    call.out_k = core::empty_rows_like(k);
    Device::forward(call);
    return {call.out_q, call.out_k};
  }

  // As rope's: mixed dtypes are promoted. Unlike rms_norm's autocast on CUDA, half precision stays, for attention casts
  // q and k to it anyway.
  struct Autocast {
    static constexpr bool kCpu = true, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      auto& [q, k, q_weight, k_weight, cos, sin, eps, offset, mode, interleaved, sections] = arguments;
      const auto wider = at::promote_types(q.scalar_type(), k.scalar_type());
      auto fits = [&](const OptionalTensor& w) { return !w || !w->defined() || w->scalar_type() == wider; };
      if (!fits(q_weight) || !fits(k_weight)) {
        for (OptionalTensor* w : {&q_weight, &k_weight}) {
          if (*w && (*w)->defined()) *w = (*w)->to(at::kFloat);
        }
      }
      q = q.to(wider), k = k.to(wider);
      for (Tensor* t : {&cos, &sin}) {
        if (t->scalar_type() != wider) *t = t->to(at::kFloat);
      }
    }
  };

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor grad_q = std::move(grads[0]), grad_k = std::move(grads[1]);
    const int64_t wanted = node.wanted() & ((grad_q.defined() ? kOfQ : 0) | (grad_k.defined() ? kOfK : 0));
    if (!wanted) return {Tensor(), Tensor(), Tensor(), Tensor()};
    Tensor q = node.take(0), k = node.take(1), q_weight = node.take(2), k_weight = node.take(3), cos = node.take(4),
           sin = node.take(5);
    const bool has_q = wanted & kOfQ, has_k = wanted & kOfK;
    const bool overwrites =
        (wanted & kOfHeads) && has_q && has_k && node.may_overwrite(grad_q, q) && node.may_overwrite(grad_k, k);
    // Heads without a gradient are replaced by a tensor without heads.
    if (!has_q) grad_q = q = k.narrow(1, 0, 0);
    if (!has_k) grad_k = k = q.narrow(1, 0, 0);
    auto [dq, dk, dq_weight, dk_weight] = core::with_options(node.options, [&](const auto&... o) {
      return Gradient::call(overwrites, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, o...);
    });
    return {dq, dk, dq_weight, dk_weight};
  }
};

}  // namespace

LIGER_OPERATOR(QkNormRope)

}  // namespace liger::ops::qk_norm_rope
