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
  rope::check_heads_and_angles(op, q, k, cos, sin, options.sections, {});
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
    out.angles = rope::make_angles(cos, sin, options.sections, {options.interleaved});
  }
  return out;
}

// ---- Backward

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

/// O: the types of the options in the schemas.
template <class... O>
struct Gradient {
  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
      const Tensor& grad_q, const Tensor& grad_k, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
      const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, int64_t wanted, O... options) {
    const bool needs_heads = (wanted & core::kWantInput) != 0;
    Tensor out_q = needs_heads ? core::empty_rows_like(q) : Tensor();
    Tensor out_k = needs_heads ? core::empty_rows_like(k) : Tensor();
    auto [dq_weight, dk_weight] =
        differentiate<Device>(out_q, out_k, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, {options...});
    return {out_q, out_k, dq_weight, dk_weight};
  }

  /// Overwrites the incoming gradients with those of q and k.
  template <class Device>
  static WeightGradients bwd_(
      Tensor& grad_q, Tensor& grad_k, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
      const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, int64_t wanted, O... options) {
    return differentiate<Device>(
        grad_q, grad_k, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, {options...});
  }
};

// ---- The operator

template <class... O>
struct Normed : core::Operator<
                    Normed<O...>,
                    std::tuple<Tensor, Tensor>(
                        const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                        const Tensor&, O...)> {
  static constexpr const char* kOp = qk_norm_rope::kOp;
  static constexpr const char* kSchema = schemas::qk_norm_rope;
  using Edges = core::Positions<0, 1, 2, 3>;
  using Constants = core::Positions<4, 5>;
  using Differentiable = core::Positions<0, 1>;
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<5>>;
  using Cpu = qk_norm_rope::Cpu;
  using Cuda = qk_norm_rope::Cuda;
  using Meta = qk_norm_rope::Meta;

  template <class Device>
  static std::tuple<Tensor, Tensor> run(
      bool, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
      const Tensor& cos, const Tensor& sin, O... given) {
    const qk_norm_rope::Options options{given...};
    Tensor wq = value_or_undefined(q_weight), wk = value_or_undefined(k_weight);
    check(kOp, q, k, wq, wk, cos, sin, options);
    Tensor out_q = core::empty_rows_like(q), out_k = core::empty_rows_like(k);
    Device::forward(describe<Device>(out_q, out_k, q, k, wq, wk, cos, sin, options));
    return {out_q, out_k};
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

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_qk_norm_rope_bwd",
        "Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, "
        "Tensor sin, int wanted, float eps, float offset, str casting_mode, bool interleaved, int[]? mrope_section",
        "(Tensor, Tensor, Tensor, Tensor)", "(Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<Gradient<O...>::template bwd<Device>>(m, "_qk_norm_rope_bwd");
    core::implement<Gradient<O...>::template bwd_<Device>>(m, "_qk_norm_rope_bwd_");
  }

  template <class Node>
  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor grad_q = std::move(grads[0]), grad_k = std::move(grads[1]);
    auto needs = [&](size_t i) { return node.needs(i); };
    const bool has_q = grad_q.defined() && (needs(0) || needs(2)), has_k = grad_k.defined() && (needs(1) || needs(3));
    if (!has_q && !has_k) return {Tensor(), Tensor(), Tensor(), Tensor()};
    Tensor q = node.take(0), k = node.take(1), q_weight = node.take(2), k_weight = node.take(3), cos = node.take(4),
           sin = node.take(5);
    const bool heads = (has_q && needs(0)) || (has_k && needs(1));
    const int64_t wanted = core::wanted_bits(heads, (has_q && needs(2)) || (has_k && needs(3)));
    auto call = [&](const auto& op) {
      return core::with_options(node.options, [&](const auto&... o) {
        return op.call(grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, wanted, o...);
      });
    };
    Tensor dq_weight, dk_weight;
    if (heads && has_q && has_k && node.may_overwrite(grad_q, q) && node.may_overwrite(grad_k, k)) {
      static const auto in_place = core::find_op<decltype(Gradient<O...>::template bwd_<Meta>)>("_qk_norm_rope_bwd_");
      std::tie(dq_weight, dk_weight) = call(in_place);
    } else {
      // Heads without a gradient are replaced by a tensor without heads.
      if (!has_q) grad_q = q = k.narrow(1, 0, 0);
      if (!has_k) grad_k = k = q.narrow(1, 0, 0);
      static const auto out_of_place = core::find_op<decltype(Gradient<O...>::template bwd<Meta>)>("_qk_norm_rope_bwd");
      std::tie(grad_q, grad_k, dq_weight, dk_weight) = call(out_of_place);
    }
    return {
        has_q && needs(0) ? grad_q : Tensor(), has_k && needs(1) ? grad_k : Tensor(),
        has_q && needs(2) ? dq_weight : Tensor(), has_k && needs(3) ? dk_weight : Tensor()};
  }
};

using QkNormRope = Normed<double, double, c10::string_view, bool, Sections>;

}  // namespace

LIGER_OPERATOR(QkNormRope)

}  // namespace liger::ops::qk_norm_rope
