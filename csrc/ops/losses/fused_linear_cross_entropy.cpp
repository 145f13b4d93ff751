// fused_linear_cross_entropy(input, weight, target, ...): cross_entropy of logits that exist for one chunk of tokens at
// a time,
//
//   logits = logits_scale * (input @ weight.T + low_rank_input @ low_rank_weight.T + bias)
//
// input: (..., H), weight: (V, H), target: (...), bias: (V,), all of one dtype except target. low_rank_input: (..., R)
// and low_rank_weight: (V, R), in that dtype or fp32, are an adapter's. ce_weight: (V,), the class weights.
// token_weight: (...), a factor for each token's loss; a mean still divides by the sum of the targets' class weights.
// Everything else is as in cross_entropy.
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
//
// With `group`, the name of a process group, its ranks have the rows of `weight` and `bias` of different classes, and
// `classes` is the number of all. Results and d input are the same on all ranks. With sequence_dim, input and d input
// are this rank's part along that dimension.

#include "ops/losses/forms.h"
#include "ops/losses/fused_linear_cross_entropy.h"
#include "ops/losses/linear_reduced.h"

namespace liger::ops::fused_linear_cross_entropy {

using core::value_or_undefined;

Forward Meta::forward(
    const char*, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias, const Tensor&,
    const Tensor&, const Settings& s, Wanted wanted) {
  return empty_forward(input, weight, target, bias, s, wanted);
}

Gradients Meta::backward(
    const char*, const Tensor&, const Tensor& input, const Tensor& weight, const Tensor&, const Tensor& bias,
    const Tensor&, const Tensor&, const Tensor&, const Settings& s, Wanted wanted) {
  return empty_gradients(input, weight, bias, wanted.gradients(), s.low_rank_input, s.low_rank_weight);
}

namespace {

Settings check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    const OptionalTensor& ce_weight, c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, double logits_scale, const OptionalTensor& token_weight,
    std::optional<int64_t> memory_budget, c10::string_view group, int64_t all_classes, ClassSizes sizes,
    std::optional<int64_t> sequence_dim, const OptionalTensor& low_rank_input, const OptionalTensor& low_rank_weight) {
  auto o = cross_entropy::parse(
      op, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, group, all_classes, sizes);
  check_activation(op, "input", input);
  check_dense(op, "weight", weight);
  check_same_device(op, "weight", weight, "input", input);
  LIGER_CHECK(
      weight.scalar_type() == input.scalar_type(), op, "weight",
      c10::str("have the dtype of input, ", input.scalar_type()), weight.scalar_type());
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, "weight",
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of input"), weight.sym_sizes(),
      core::hint_if_swapped("input", input, "weight", weight, target));
  const auto classes = weight.sym_size(0);
  check_integers(op, "target", target);
  check_same_device(op, "target", target, "input", input);
  // Along sequence_dim only the ranks together know the size.
  const int64_t token_dims = input.dim() - 1;
  sequence_dim = check_sequence_dim(op, "input", input, sequence_dim, o.vocabulary);
  std::vector<c10::SymInt> token_sizes = input.sym_sizes().slice(0, token_dims).vec();
  if (sequence_dim && target.dim() == token_dims) token_sizes[*sequence_dim] = target.sym_size(*sequence_dim);
  c10::SymIntArrayRef tokens = token_sizes;
  auto check_tokens = [&](const char* name, const Tensor& t) {
    LIGER_CHECK(
        t.sym_sizes().equals(tokens), op, name,
        c10::str("have shape ", tokens, ", that of input without its last dimension"), t.sym_sizes(),
        core::hint_if_swapped("input", input, "weight", weight, t));
  };
  check_tokens("target", target);
  auto check_classes = [&](const char* name, const OptionalTensor& t, const c10::SymInt& classes, bool float_too) {
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
  check_classes("bias", bias, classes, false);
  check_classes("ce_weight", ce_weight, o.vocabulary.is_split() ? c10::SymInt(all_classes) : classes, true);
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
  Settings s{o, logits_scale, token_weight, memory_budget, sequence_dim, {}, {}};
  s.low_rank_input = value_or_undefined(low_rank_input), s.low_rank_weight = value_or_undefined(low_rank_weight);
  check_low_rank(op, "", input, weight, s.low_rank_input, s.low_rank_weight, sequence_dim);
  return s;
}

// input, weight, target, bias, ce_weight, token_weight, stats, totals, low_rank_input, low_rank_weight
struct BackwardNode : core::BackwardNode<BackwardNode, 10> {
  Settings s;
  int64_t wanted;

  auto state() { return std::tuple_cat(s.o.tie(), std::tie(s.logits_scale, s.memory_budget, s.sequence_dim, wanted)); }

  std::string name() const override { return Wanted().op(); }
  core::variable_list backward(core::variable_list&& grads) override;
};

using Loss = Tensor;
using Metrics = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using LogProbs = std::tuple<Tensor, Tensor, Tensor>;

/// O: the types of the options in the schemas.
template <class... O>
struct Ops {
  using Cpu = fused_linear_cross_entropy::Cpu;
  using Cuda = fused_linear_cross_entropy::Cuda;
  using Meta = fused_linear_cross_entropy::Meta;
  // Casts the arguments that F.linear casts. The loss is fp32 in any case.
  using Autocast = core::AutocastLinear<0, 1, 3>;

  template <class Result>
  static constexpr const char* name() {
    return wanted_of<Result>().op();
  }

  template <class Result>
  static constexpr const char* schema() {
    constexpr Wanted wanted = wanted_of<Result>();
    return wanted.metrics  ? schemas::fused_linear_cross_entropy_with_metrics
        : wanted.log_probs ? schemas::fused_linear_cross_entropy_with_log_probs
                           : schemas::fused_linear_cross_entropy;
  }

  using Everything = std::tuple<
      Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

  template <class Device>
  static Forward run_wanted(
      Wanted wanted, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, const OptionalTensor& divisors, O... options) {
    Settings s = check(wanted.op(), input, weight, target, bias, ce_weight, options...);
    return Device::forward(
        wanted.op(), input, weight, target, value_or_undefined(bias), value_or_undefined(ce_weight),
        value_or_undefined(divisors), s, wanted);
  }

  static Loss result(const Forward& out, Loss*) { return out.rows.loss; }
  static Metrics result(const Forward& out, Metrics*) {
    return {out.rows.loss, out.rows.z_loss, out.rows.accuracy, out.rows.predicted};
  }
  static LogProbs result(const Forward& out, LogProbs*) { return {out.rows.loss, out.log_probs, out.entropy}; }

  template <class Device, class Result>
  static Result run(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    return result(
        run_wanted<Device>(wanted_of<Result>(), input, weight, target, bias, ce_weight, {}, options...),
        static_cast<Result*>(nullptr));
  }

  template <class Result>
  static constexpr Wanted wanted_of() {
    Wanted wanted;
    wanted.metrics = std::is_same_v<Result, Metrics>;
    wanted.log_probs = std::is_same_v<Result, LogProbs>;
    return wanted;
  }

  /// divisors: of a mean, if they are not those of `target`.
  template <class Device>
  static Everything fwd(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, const OptionalTensor& divisors, O... options, int64_t wanted) {
    Forward out =
        run_wanted<Device>(Wanted::from_bits(wanted), input, weight, target, bias, ce_weight, divisors, options...);
    const Gradients& g = out.gradients;
    return {out.rows.loss,   out.rows.z_loss,   out.rows.accuracy, out.rows.predicted,
            out.log_probs,   out.entropy,       g.input,           g.weight,
            g.bias,          g.low_rank_input,  g.low_rank_weight, out.rows.stats,
            out.rows.totals, out.deferred_scale};
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(
      const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, const Tensor& stats, const OptionalTensor& totals, O... options,
      int64_t wanted) {
    const char* op = Wanted().op();
    Settings s = check(op, input, weight, target, bias, ce_weight, options...);
    Gradients out = Device::backward(
        op, grad, input, weight, target, value_or_undefined(bias), value_or_undefined(ce_weight), stats,
        value_or_undefined(totals), s, Wanted::from_bits(wanted));
    return {out.input, out.weight, out.bias, out.low_rank_input, out.low_rank_weight};
  }

  template <class Device>
  static void implement(torch::Library& m) {
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
    core::check_no_forward_ad(op, input, weight, bias, ce_weight, s.token_weight, s.low_rank_input, s.low_rank_weight);
    auto check_constant = [&](const char* name, const OptionalTensor& t) {
      bool learned = torch::autograd::compute_requires_grad(t);
      LIGER_CHECK(!learned, op, name, "not require a gradient", "one that does");
    };
    check_constant("ce_weight", ce_weight);
    check_constant("token_weight", s.token_weight);
    wanted.input = torch::autograd::compute_requires_grad(input);
    wanted.weight = torch::autograd::compute_requires_grad(weight);
    wanted.bias = torch::autograd::compute_requires_grad(bias);
    wanted.low_rank_input = torch::autograd::compute_requires_grad(s.low_rank_input);
    wanted.low_rank_weight = torch::autograd::compute_requires_grad(s.low_rank_weight);
    if (!wanted.any_gradient()) return std::nullopt;
    static const auto fwd_op = core::find_op<decltype(fwd<Meta>)>("_fused_linear_cross_entropy_fwd");
    Forward out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(
          out.rows.loss, out.rows.z_loss, out.rows.accuracy, out.rows.predicted, out.log_probs, out.entropy,
          out.gradients.input, out.gradients.weight, out.gradients.bias, out.gradients.low_rank_input,
          out.gradients.low_rank_weight, out.rows.stats, out.rows.totals, out.deferred_scale) =
          fwd_op.call(input, weight, target, bias, ce_weight, {}, options..., wanted.bits());
    }
    auto edges = torch::autograd::collect_next_edges(input, weight, bias, s.low_rank_input, s.low_rank_weight);
    if (s.o.reduced()) {
      connect_reduced(Wanted().op(), out.rows.loss, std::move(edges), out.gradients, out.deferred_scale);
    } else {
      auto node = core::make_node<BackwardNode>();
      node->set_next_edges(std::move(edges));
      node->save(
          input, weight, target, bias, ce_weight, s.token_weight, out.rows.stats, out.rows.totals, s.low_rank_input,
          s.low_rank_weight);
      node->s = s;
      node->s.token_weight = std::nullopt;
      node->s.low_rank_input = node->s.low_rank_weight = Tensor();
      node->wanted = wanted.bits();
      torch::autograd::set_history(out.rows.loss, node);
    }
    // Only the node may hold the gradients, so that backward can overwrite them.
    out.gradients = {};
    return out;
  }

  template <class Result>
  static std::optional<Result> with_graph(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      const OptionalTensor& ce_weight, O... options) {
    auto out = forward_with_graph(wanted_of<Result>(), input, weight, target, bias, ce_weight, options...);
    return out ? std::optional(result(*out, static_cast<Result*>(nullptr))) : std::nullopt;
  }

  template <class Result>
  using Form = ops::Form<
      Ops, Result, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, O...>;
};

using Linear =
    Ops<c10::string_view, int64_t, double, double, std::optional<double>, double, const OptionalTensor&,
        std::optional<int64_t>, c10::string_view, int64_t, ClassSizes, std::optional<int64_t>, const OptionalTensor&,
        const OptionalTensor&>;

core::variable_list BackwardNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return core::variable_list(5);
  Tensor input = take(0), weight = take(1), target = take(2), bias = take(3), ce_weight = take(4);
  OptionalTensor token_weight = take(5);
  Tensor stats = take(6), totals = take(7);
  OptionalTensor low_rank_input = take(8), low_rank_weight = take(9);
  static const auto op = core::find_op<decltype(Linear::bwd<Meta>)>("_fused_linear_cross_entropy_bwd");
  const Vocabulary& v = s.o.vocabulary;
  auto [dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight] = op.call(
      grad, input, weight, target, bias, ce_weight, stats, totals, s.o.reduction_name(), s.o.ignore_index,
      s.o.label_smoothing, s.o.lse_square_scale, s.o.softcap, s.logits_scale, token_weight, s.memory_budget, v.group,
      v.classes, v.class_sizes(), s.sequence_dim, low_rank_input, low_rank_weight, wanted);
  return {dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight};
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
  Plan plan = make_plan(op, tokens, classes, dtype, wanted, memory_budget, false);
  const int64_t gradients =
      (wanted.input ? tokens * hidden : 0) + (wanted.weight ? classes * hidden : 0) + (wanted.bias ? classes : 0);
  return {plan.chunk, plan.chunks, plan.bytes, gradients * int64_t(c10::elementSize(dtype))};
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  const std::string tensors = "Tensor input, Tensor weight, Tensor target, ";
  const std::string options =
      "str reduction, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, "
      "float logits_scale, Tensor? token_weight, int? memory_budget, str group, int classes, int[]? class_sizes, "
      "int? sequence_dim, Tensor? low_rank_input, Tensor? low_rank_weight, int wanted) -> ";
  core::define(
      m,
      "_fused_linear_cross_entropy_fwd(" + tensors + "Tensor? bias, Tensor? ce_weight, Tensor? totals, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
          "Tensor)");
  core::define(
      m,
      "_fused_linear_cross_entropy_bwd(Tensor grad, " + tensors +
          "Tensor? bias, Tensor? ce_weight, Tensor stats, Tensor? totals, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_fused_linear_cross_entropy_plan(int tokens, int hidden, int vocabulary, ScalarType dtype, int wanted, "
      "int? memory_budget) -> (int, int, int, int)",
      plan);
}

LIGER_LIBRARY_IMPL(CPU, m) { Linear::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { Linear::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { Linear::implement<Meta>(m); }

LIGER_OPERATOR(Linear::Form<Loss>)
LIGER_OPERATOR(Linear::Form<Metrics>)
LIGER_OPERATOR(Linear::Form<LogProbs>)

}  // namespace liger::ops::fused_linear_cross_entropy
