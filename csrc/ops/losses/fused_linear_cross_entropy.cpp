// fused_linear_cross_entropy(input, weight, target, ...): cross_entropy of logits that exist for one chunk of tokens at
// a time,
//
//   logits = logits_scale * (input @ weight.T + bias)
//
// input: (..., H), weight: (V, H), target: (...), bias: (V,), all of one dtype except target. ce_weight: (V,), the
// class weights. token_weight: (...), a factor for each token's loss; a mean still divides by the sum of the targets'
// class weights. Everything else is as in cross_entropy.
//
// For a reduced loss, forward computes the gradients while a chunk's logits exist. That takes three GEMMs per chunk,
// the minimum. Backward multiplies them by the incoming gradient, on the device, and writes nothing if that is 1.
// With reduction="none", forward cannot know the incoming gradients, so backward computes the logits again.
//
// fp16 cannot represent small gradients. So in fp16, forward computes the gradients of the sum rather than the mean,
// and scales those of weight and bias down by a power of two. Backward multiplies by the deferred scale, which includes
// the mean's divisor.
//
// fused_linear_cross_entropy_with_metrics    (loss, z_loss, token_accuracy, predicted_tokens)
// fused_linear_cross_entropy_with_log_probs  (loss, log p of the targets, entropy of the predictions)
// Only the first of their results has a gradient.

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "ops/losses/fused_linear_cross_entropy.h"

namespace liger::ops::fused_linear_cross_entropy {

using core::value_or_undefined;

Forward Meta::forward(
    const char*, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias, const Tensor&,
    const Settings& s, Wanted wanted) {
  return empty_forward(input, weight, target, bias, s, wanted);
}

Gradients Meta::backward(
    const char*, const Tensor&, const Tensor& input, const Tensor& weight, const Tensor&, const Tensor& bias,
    const Tensor&, const Tensor&, const Tensor&, const Settings&, Wanted wanted) {
  return empty_gradients(input, weight, bias, wanted);
}

namespace {

Settings check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    const OptionalTensor& ce_weight, c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, double logits_scale, const OptionalTensor& token_weight,
    std::optional<int64_t> memory_budget) {
  check_activation(op, "input", input);
  check_dense(op, "weight", weight);
  check_same_device(op, "weight", weight, "input", input);
  LIGER_CHECK(
      weight.scalar_type() == input.scalar_type(), op, "weight",
      c10::str("have the dtype of input, ", input.scalar_type()), weight.scalar_type());
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, "weight",
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of input"),
      weight.sym_sizes());
  const auto classes = weight.sym_size(0);
  check_dense(op, "target", target);
  check_same_device(op, "target", target, "input", input);
  LIGER_CHECK(
      target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, op, "target",
      "be int64 or int32 class indices", target.scalar_type());
  auto tokens = input.sym_sizes().slice(0, input.dim() - 1);
  auto check_tokens = [&](const char* name, const Tensor& t) {
    LIGER_CHECK(
        t.sym_sizes().equals(tokens), op, name,
        c10::str("have shape ", tokens, ", that of input without its last dimension"), t.sym_sizes());
  };
  check_tokens("target", target);
  auto check_classes = [&](const char* name, const OptionalTensor& t, bool float_too) {
    if (!t || !t->defined()) return;
    check_dense(op, name, *t);
    check_same_device(op, name, *t, "input", input);
    auto dtype = t->scalar_type(), like = input.scalar_type();
    LIGER_CHECK(
        dtype == like || (float_too && dtype == at::kFloat && like != at::kDouble), op, name,
        c10::str(float_too ? "be float32 or " : "", "have the dtype of input, ", like), dtype);
    LIGER_CHECK(
        t->dim() == 1 && t->sym_size(0) == classes, op, name,
        c10::str("have shape [", classes, "], one value per class"), t->sym_sizes());
  };
  check_classes("bias", bias, false);
  check_classes("ce_weight", ce_weight, true);
  if (token_weight && token_weight->defined()) {
    check_dense(op, "token_weight", *token_weight);
    check_same_device(op, "token_weight", *token_weight, "input", input);
    LIGER_CHECK(
        at::isFloatingType(token_weight->scalar_type()), op, "token_weight", "be floating point",
        token_weight->scalar_type());
    check_tokens("token_weight", *token_weight);
  }
  LIGER_CHECK(std::isfinite(logits_scale), op, "logits_scale", "be finite", logits_scale);
  LIGER_CHECK(
      !memory_budget || *memory_budget > 0, op, "memory_budget", "be a positive number of bytes", *memory_budget);
  auto o = cross_entropy::parse(op, reduction, ignore_index, label_smoothing, lse_square_scale, softcap);
  return {o, logits_scale, token_weight, memory_budget};
}

struct ReducedBackwardNode : core::BackwardNode<ReducedBackwardNode, 4> {  // gradients of input, weight, bias; scale
  std::string name() const override { return "fused_linear_cross_entropy"; }
  core::variable_list backward(core::variable_list&& grads) override;
};

// input, weight, target, bias, ce_weight, token_weight, stats, totals
struct BackwardNode : core::BackwardNode<BackwardNode, 8> {
  Settings s;
  int64_t wanted;

  auto state() { return std::tuple_cat(s.o.tie(), std::tie(s.logits_scale, s.memory_budget, wanted)); }

  std::string name() const override { return "fused_linear_cross_entropy"; }
  core::variable_list backward(core::variable_list&& grads) override;
};

/// O: the types of the options in the schemas.
template <class... O>
struct Ops {
  using Everything =
      std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

  template <class Device>
  static Forward run(
      const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, Wanted wanted, O... options) {
    Settings s = check(op, input, weight, target, bias, ce_weight, options...);
    return Device::forward(
        op, input, weight, target, value_or_undefined(bias), value_or_undefined(ce_weight), s, wanted);
  }

  template <class Device>
  static Tensor loss(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    return run<Device>("fused_linear_cross_entropy", input, weight, target, bias, ce_weight, {}, options...).rows.loss;
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor, Tensor> with_metrics(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    Wanted wanted;
    wanted.metrics = true;
    const char* op = "fused_linear_cross_entropy_with_metrics";
    Forward out = run<Device>(op, input, weight, target, bias, ce_weight, wanted, options...);
    return {out.rows.loss, out.rows.z_loss, out.rows.accuracy, out.rows.predicted};
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> with_log_probs(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    Wanted wanted;
    wanted.log_probs = true;
    const char* op = "fused_linear_cross_entropy_with_log_probs";
    Forward out = run<Device>(op, input, weight, target, bias, ce_weight, wanted, options...);
    return {out.rows.loss, out.log_probs, out.entropy};
  }

  template <class Device>
  static Everything fwd(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options, int64_t wanted) {
    Wanted w = Wanted::from_bits(wanted);
    Forward out = run<Device>(w.op(), input, weight, target, bias, ce_weight, w, options...);
    return {out.rows.loss,      out.rows.z_loss, out.rows.accuracy,   out.rows.predicted,
            out.log_probs,      out.entropy,     out.gradients.input, out.gradients.weight,
            out.gradients.bias, out.rows.stats,  out.rows.totals,     out.deferred_scale};
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> bwd(
      const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, const Tensor& stats, const OptionalTensor& totals, O... options,
      int64_t wanted) {
    const char* op = "fused_linear_cross_entropy";
    Settings s = check(op, input, weight, target, bias, ce_weight, options...);
    Gradients out = Device::backward(
        op, grad, input, weight, target, value_or_undefined(bias), value_or_undefined(ce_weight), stats,
        value_or_undefined(totals), s, Wanted::from_bits(wanted));
    return {out.input, out.weight, out.bias};
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<loss<Device>>(m, "fused_linear_cross_entropy");
    core::implement<with_metrics<Device>>(m, "fused_linear_cross_entropy_with_metrics");
    core::implement<with_log_probs<Device>>(m, "fused_linear_cross_entropy_with_log_probs");
    core::implement<fwd<Device>>(m, "_fused_linear_cross_entropy_fwd");
    core::implement<bwd<Device>>(m, "_fused_linear_cross_entropy_bwd");
  }

  // ---- Autograd

  /// std::nullopt if no argument requires a gradient.
  static std::optional<Forward> forward_with_graph(
      Wanted wanted, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    const char* op = wanted.op();
    core::check_dense(op, "input", input);
    core::check_dense(op, "weight", weight);
    core::check_dense(op, "target", target);
    Settings s = check(op, input, weight, target, bias, ce_weight, options...);
    core::check_no_forward_ad(op, input, weight, bias, ce_weight, s.token_weight);
    auto check_constant = [&](const char* name, const OptionalTensor& t) {
      bool learned = torch::autograd::compute_requires_grad(t);
      LIGER_CHECK(!learned, op, name, "not require a gradient", "one that does");
    };
    check_constant("ce_weight", ce_weight);
    check_constant("token_weight", s.token_weight);
    wanted.input = torch::autograd::compute_requires_grad(input);
    wanted.weight = torch::autograd::compute_requires_grad(weight);
    wanted.bias = torch::autograd::compute_requires_grad(bias);
    if (!wanted.any_gradient()) return std::nullopt;
    static const auto fwd_op = core::find_op<decltype(fwd<Meta>)>("liger::_fused_linear_cross_entropy_fwd");
    Forward out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(
          out.rows.loss, out.rows.z_loss, out.rows.accuracy, out.rows.predicted, out.log_probs, out.entropy,
          out.gradients.input, out.gradients.weight, out.gradients.bias, out.rows.stats, out.rows.totals,
          out.deferred_scale) = fwd_op.call(input, weight, target, bias, ce_weight, options..., wanted.bits());
    }
    auto edges = torch::autograd::collect_next_edges(input, weight, bias);
    auto save = [](const auto& t) { return core::SavedVariable(t, false); };
    if (s.o.reduced()) {
      auto node = core::make_node<ReducedBackwardNode>();
      node->set_next_edges(std::move(edges));
      node->saved = {
          save(out.gradients.input), save(out.gradients.weight), save(out.gradients.bias), save(out.deferred_scale)};
      torch::autograd::set_history(out.rows.loss, node);
    } else {
      auto node = core::make_node<BackwardNode>();
      node->set_next_edges(std::move(edges));
      node->saved = {save(input),     save(weight),         save(target),         save(bias),
                     save(ce_weight), save(s.token_weight), save(out.rows.stats), save(out.rows.totals)};
      node->s = s;
      node->s.token_weight = std::nullopt;
      node->wanted = wanted.bits();
      torch::autograd::set_history(out.rows.loss, node);
    }
    // Only the node may hold the gradients, so that backward can overwrite them.
    out.gradients = {};
    return out;
  }

  using Loss = Tensor;
  using Metrics = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  using LogProbs = std::tuple<Tensor, Tensor, Tensor>;

  static Loss autograd(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    if (auto out = forward_with_graph({}, input, weight, target, bias, ce_weight, options...)) return out->rows.loss;
    static const auto op = core::find_op<decltype(loss<Meta>)>("liger::fused_linear_cross_entropy");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(input, weight, target, bias, ce_weight, options...);
  }

  static Metrics autograd_with_metrics(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    Wanted wanted;
    wanted.metrics = true;
    if (auto out = forward_with_graph(wanted, input, weight, target, bias, ce_weight, options...)) {
      return {out->rows.loss, out->rows.z_loss, out->rows.accuracy, out->rows.predicted};
    }
    static const auto op =
        core::find_op<decltype(with_metrics<Meta>)>("liger::fused_linear_cross_entropy_with_metrics");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(input, weight, target, bias, ce_weight, options...);
  }

  static LogProbs autograd_with_log_probs(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    Wanted wanted;
    wanted.log_probs = true;
    if (auto out = forward_with_graph(wanted, input, weight, target, bias, ce_weight, options...)) {
      return {out->rows.loss, out->log_probs, out->entropy};
    }
    static const auto op =
        core::find_op<decltype(with_log_probs<Meta>)>("liger::fused_linear_cross_entropy_with_log_probs");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(input, weight, target, bias, ce_weight, options...);
  }

  // ---- Autocast: casts the arguments that F.linear casts. The loss is fp32 in any case.

  template <c10::DeviceType kDevice>
  struct Autocast {
    static Tensor cast(const Tensor& t) {
      return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
    }
    static OptionalTensor cast(const OptionalTensor& t) { return t && t->defined() ? OptionalTensor(cast(*t)) : t; }

    template <class Function>
    static auto redispatch(
        const c10::TypedOperatorHandle<Function>& op, const Tensor& input, const Tensor& weight, const Tensor& target,
        const OptionalTensor& bias, const OptionalTensor& ce_weight, O... options) {
      c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
      return op.call(cast(input), cast(weight), target, cast(bias), ce_weight, options...);
    }

    static Tensor loss(
        const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
        const OptionalTensor& ce_weight, O... options) {
      static const auto op = core::find_op<decltype(Ops::loss<Meta>)>("liger::fused_linear_cross_entropy");
      return redispatch(op, input, weight, target, bias, ce_weight, options...);
    }
    static Metrics with_metrics(
        const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
        const OptionalTensor& ce_weight, O... options) {
      static const auto op =
          core::find_op<decltype(Ops::with_metrics<Meta>)>("liger::fused_linear_cross_entropy_with_metrics");
      return redispatch(op, input, weight, target, bias, ce_weight, options...);
    }
    static LogProbs with_log_probs(
        const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
        const OptionalTensor& ce_weight, O... options) {
      static const auto op =
          core::find_op<decltype(Ops::with_log_probs<Meta>)>("liger::fused_linear_cross_entropy_with_log_probs");
      return redispatch(op, input, weight, target, bias, ce_weight, options...);
    }

    static void implement(torch::Library& m) {
      core::implement<loss>(m, "fused_linear_cross_entropy");
      core::implement<with_metrics>(m, "fused_linear_cross_entropy_with_metrics");
      core::implement<with_log_probs>(m, "fused_linear_cross_entropy_with_log_probs");
    }
  };
};

using Linear =
    Ops<c10::string_view, int64_t, double, double, std::optional<double>, double, const OptionalTensor&,
        std::optional<int64_t>>;

/// Multiplies a gradient from forward by a factor; in place if `overwrite`.
Tensor scaled(const Tensor& gradient, const Tensor& factor, bool overwrite) {
  using Function = Tensor(const Tensor&, const Tensor&, c10::string_view);
  using InPlace = void(Tensor&, const Tensor&, c10::string_view);
  constexpr const char* kOp = "fused_linear_cross_entropy backward";
  if (!overwrite) {
    static const auto op = core::find_op<Function>("liger::_cross_entropy_scale");
    return op.call(gradient, factor, kOp);
  }
  static const auto op = core::find_op<InPlace>("liger::_cross_entropy_scale_");
  Tensor flat = as_long_rows(gradient);
  op.call(flat, factor, kOp);
  return gradient;
}

core::variable_list ReducedBackwardNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
  core::variable_list out;
  Tensor deferred_scale = take(3);
  for (size_t i = 0; i < 3; ++i) {
    Tensor gradient = take(i);
    if (gradient.defined()) {
      Tensor factor = deferred_scale.defined() ? grad * deferred_scale.select(0, i > 0) : grad;
      gradient = scaled(gradient, factor, may_overwrite(gradient, gradient));
    }
    out.push_back(std::move(gradient));
  }
  return out;
}

core::variable_list BackwardNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
  Tensor input = take(0), weight = take(1), target = take(2), bias = take(3), ce_weight = take(4);
  OptionalTensor token_weight = take(5);
  Tensor stats = take(6), totals = take(7);
  static const auto op = core::find_op<decltype(Linear::bwd<Meta>)>("liger::_fused_linear_cross_entropy_bwd");
  auto [dinput, dweight, dbias] = op.call(
      grad, input, weight, target, bias, ce_weight, stats, totals, s.o.reduction_name(), s.o.ignore_index,
      s.o.label_smoothing, s.o.lse_square_scale, s.o.softcap, s.logits_scale, token_weight, s.memory_budget, wanted);
  return {dinput, dweight, dbias};
}

/// (tokens per chunk, chunks, bytes of workspace, bytes of gradients)
std::tuple<int64_t, int64_t, int64_t, int64_t> plan(
    int64_t tokens, int64_t hidden, int64_t classes, at::ScalarType dtype, int64_t wanted_bits,
    std::optional<int64_t> memory_budget) {
  const char* op = "fused_linear_cross_entropy_plan";
  const Wanted wanted = Wanted::from_bits(wanted_bits);
  LIGER_CHECK(
      tokens >= 0 && hidden > 0 && classes > 0, op, "the sizes", "be positive",
      c10::str(tokens, " tokens, ", hidden, " hidden, ", classes, " classes"));
  LIGER_CHECK(at::isFloatingType(dtype), op, "dtype", "be floating point", dtype);
  Plan plan = make_plan(op, tokens, classes, dtype, wanted, memory_budget);
  const int64_t gradients =
      (wanted.input ? tokens * hidden : 0) + (wanted.weight ? classes * hidden : 0) + (wanted.bias ? classes : 0);
  return {plan.chunk, plan.chunks, plan.bytes, gradients * int64_t(c10::elementSize(dtype))};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  const std::string tensors = "Tensor input, Tensor weight, Tensor target, ";
  const std::string tail = tensors +
      "Tensor? bias=None, Tensor? ce_weight=None, str reduction=\"mean\", int ignore_index=-100, "
      "float label_smoothing=0.0, float lse_square_scale=0.0, float? softcap=None, *, float logits_scale=1.0, "
      "Tensor? token_weight=None, int? memory_budget=None) -> ";
  const std::string options =
      "str reduction, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, "
      "float logits_scale, Tensor? token_weight, int? memory_budget, int wanted) -> ";
  core::define(m, "fused_linear_cross_entropy(" + tail + "Tensor");
  core::define(m, "fused_linear_cross_entropy_with_metrics(" + tail + "(Tensor, Tensor, Tensor, Tensor)");
  core::define(m, "fused_linear_cross_entropy_with_log_probs(" + tail + "(Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_cross_entropy_fwd(" + tensors + "Tensor? bias, Tensor? ce_weight, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_cross_entropy_bwd(Tensor grad, " + tensors +
          "Tensor? bias, Tensor? ce_weight, Tensor stats, Tensor? totals, " + options + "(Tensor, Tensor, Tensor)");
  m.def(
      "_fused_linear_cross_entropy_plan(int tokens, int hidden, int vocabulary, ScalarType dtype, int wanted, "
      "int? memory_budget) -> (int, int, int, int)",
      plan);
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { Linear::implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { Linear::implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { Linear::implement<Meta>(m); }

TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("fused_linear_cross_entropy", Linear::autograd);
  m.impl("fused_linear_cross_entropy_with_metrics", Linear::autograd_with_metrics);
  m.impl("fused_linear_cross_entropy_with_log_probs", Linear::autograd_with_log_probs);
}

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { Linear::Autocast<c10::DeviceType::CUDA>::implement(m); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { Linear::Autocast<c10::DeviceType::CPU>::implement(m); }

}  // namespace liger::ops::fused_linear_cross_entropy
