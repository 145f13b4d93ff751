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

#include "ops/losses/linear/checks.h"
#include "ops/losses/linear/fused_linear_cross_entropy.h"
#include "ops/losses/linear/node.h"

namespace liger::ops::fused_linear_cross_entropy {

using core::value_or_undefined;

Forward Meta::forward(const Call& call, const Tensor&, Wanted wanted) { return empty_forward(call, wanted); }

Gradients Meta::backward(const Call& call, const Tensor&, const Tensor&, const Tensor&, Wanted wanted) {
  return empty_gradients(call.trained(), wanted);
}

namespace {

Call check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    const OptionalTensor& ce_weight, c10::string_view reduction, int64_t ignore_index, double label_smoothing,
    double lse_square_scale, std::optional<double> softcap, double logits_scale, const OptionalTensor& token_weight,
    std::optional<int64_t> memory_budget, c10::string_view group, int64_t all_classes, ClassSizes sizes,
    std::optional<int64_t> sequence_dim, const OptionalTensor& low_rank_input, const OptionalTensor& low_rank_weight) {
  auto o = cross_entropy::parse(
      op, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, group, all_classes, sizes);
  const Call call{
      op,
      input,
      weight,
      target,
      value_or_undefined(bias),
      value_or_undefined(ce_weight),
      value_or_undefined(token_weight),
      value_or_undefined(low_rank_input),
      value_or_undefined(low_rank_weight),
      o,
      logits_scale,
      memory_budget,
      check_sequence_dim(op, "input", input, sequence_dim, o.vocabulary)};
  HeadCheck{op, "", call.trained(), "input", input}(target, call.sequence_dim);
  const auto tokens = check_target(op, input, weight, target, call.sequence_dim, false);
  if (const Tensor& t = call.ce_weight; t.defined()) {
    check_dense(op, "ce_weight", t);
    check_same_device(op, "ce_weight", t, "input", input);
    check_parameter_dtype(op, "ce_weight", t, "input", input);
    check_per_class(op, "ce_weight", t, o.vocabulary.is_split() ? c10::SymInt(all_classes) : weight.sym_size(0));
  }
  check_token_weight(op, call.token_weight, "input", input, tokens);
  check_finite(op, "logits_scale", logits_scale);
  check_memory_budget(op, memory_budget);
  return call;
}

using Loss = Tensor;
using Metrics = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using LogProbs = std::tuple<Tensor, Tensor, Tensor>;
using ForwardResults = decltype(copies(Forward().tie()));

constexpr const char* kOp = Wanted().op();

consteval size_t at(std::string_view argument) { return position(schemas::fused_linear_cross_entropy, argument); }

/// Of the types of arguments, see Split.
template <class Tensors, class Options>
struct Ops;

template <class... T, class... O>
struct Ops<void(T...), void(O...)> {
  /// totals: the divisors of a mean, if they are not those of `target`.
  struct Fwd : core::Private<Fwd, ForwardResults(T..., const OptionalTensor&, O..., int64_t)> {
    static constexpr const char *kName = "_fused_linear_cross_entropy_fwd",
                                *kPublic = schemas::fused_linear_cross_entropy,
                                *kArguments = "input...ce_weight, totals, reduction..., wanted";

    template <class Device>
    static ForwardResults run(T... tensors, const OptionalTensor& totals, O... options, int64_t wanted_bits) {
      const Wanted wanted = Wanted::from_bits(wanted_bits);
      const Call call = check(wanted.op(), tensors..., options...);
      return copies(Device::forward(call, value_or_undefined(totals), wanted).tie());
    }
  };

  struct Bwd
      : core::Private<Bwd, FiveGradients(const Tensor&, T..., const Tensor&, const OptionalTensor&, O..., int64_t)> {
    static constexpr const char *kOp = fused_linear_cross_entropy::kOp, *kName = "_fused_linear_cross_entropy_bwd",
                                *kPublic = schemas::fused_linear_cross_entropy,
                                *kArguments = "grad, input...ce_weight, stats, totals, reduction..., wanted";

    template <class Device>
    static FiveGradients run(
        const Tensor& grad, T... tensors, const Tensor& stats, const OptionalTensor& totals, O... options,
        int64_t wanted) {
      const Call call = check(kOp, tensors..., options...);
      const Tensor divisors = value_or_undefined(totals);
      return copies(Device::backward(call, grad, stats.contiguous(), divisors, Wanted::from_bits(wanted)).tie());
    }
  };

  struct Node : LinearNode<Node, Bwd, T..., const Tensor&, const OptionalTensor&, O...> {
    void record(const ForwardResults& results, T... tensors, O... options) {
      Forward out;
      out.tie() = results;
      this->keep(out.gradients, out.deferred_scale, tensors..., out.rows.stats, out.rows.totals, options...);
      this->connect(out.rows.loss);
    }
  };

  /// The operator that returns R.
  template <class R>
  struct Form : core::Operator<Form<R>, R(T..., O...)> {
    static constexpr Wanted kWanted{{}, std::is_same_v<R, Metrics>, std::is_same_v<R, LogProbs>};
    static constexpr const char* kOp = kWanted.op();
    static constexpr const char* kSchema = kWanted.metrics ? schemas::fused_linear_cross_entropy_with_metrics
        : kWanted.log_probs                                ? schemas::fused_linear_cross_entropy_with_log_probs
                                                           : schemas::fused_linear_cross_entropy;
    using Edges = core::Positions<at("input"), at("weight"), at("bias"), at("low_rank_input"), at("low_rank_weight")>;
    using Constants = core::Positions<at("ce_weight"), at("token_weight")>;
    using Node = Ops::Node;
    // Casts the arguments that F.linear casts. The loss is fp32 in any case.
    using Autocast = core::AutocastLinear<at("input"), at("weight"), at("bias")>;
    // Of all forms.
    using Privates = std::conditional_t<std::is_same_v<R, Loss>, core::Privates<Fwd, Bwd>, core::Privates<>>;
    using Cpu = fused_linear_cross_entropy::Cpu;
    using Cuda = fused_linear_cross_entropy::Cuda;
    using Meta = fused_linear_cross_entropy::Meta;

    template <class Device>
    static ForwardResults run(bool, T... tensors, O... options) {
      return leading(Fwd::template run<Device>(tensors..., {}, options..., kWanted.bits()));
    }

    static ForwardResults run_forward(T... tensors, O... options) {
      const int64_t wanted = kWanted.bits() | required(Edges(), tensors..., options...);
      at::AutoDispatchBelowADInplaceOrView below;
      return leading(Fwd::call(tensors..., {}, options..., wanted));
    }

    /// With the results of R before all others. The loss stays the first.
    static ForwardResults leading(ForwardResults out) {
      if constexpr (kWanted.log_probs) {
        std::swap(std::get<1>(out), std::get<4>(out));
        std::swap(std::get<2>(out), std::get<5>(out));
      }
      return out;
    }
  };
};

using Types = linear::Split<at("ce_weight") + 1, decltype(check)>;
using Linear = Ops<Types::Tensors, Types::Options>;

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
  m.def(
      "_fused_linear_cross_entropy_plan(int tokens, int hidden, int vocabulary, ScalarType dtype, int wanted, "
      "int? memory_budget) -> (int, int, int, int)",
      plan);
}

LIGER_OPERATOR(Linear::Form<Loss>)
LIGER_OPERATOR(Linear::Form<Metrics>)
LIGER_OPERATOR(Linear::Form<LogProbs>)

}  // namespace liger::ops::fused_linear_cross_entropy
