// fused_linear_log_probs(input, weight, target, ...): log_probs of logits that exist for one chunk at a time,
//
//   z = softcap(logits_scale * (input @ weight.T + low_rank_input @ low_rank_weight.T + bias)) / temperature
//
// input: (..., H), weight: (V, H), target: (...) or (..., K) ids, bias: (V,), low_rank_input: (..., R) and
// low_rank_weight: (V, R), of an adapter. Returns log p of the ids and, where they are wanted, of each token the
// entropy, the mean of z, log(sum of p^2), and whether an id has the largest z. The first two have gradients. fp32
// input goes with a half-precision weight too.
//
// fused_linear_log_probs_with_log_sum_exp also returns log(sum of exp(z)), which has a gradient.
//
// If only input requires a gradient and is not split along a sequence, its gradient is linear in each token's upstream
// gradients: forward multiplies weight by the gradients of logits for an upstream gradient of 1, and backward scales
// the rows. Several ids of a token have different upstream gradients, and so has a single one beside log(sum of
// exp(z)): backward adds their rows of weight. The product for the entropy is made under entropy_grad; without it a
// gradient of the entropy makes backward compute the logits again, as it does for the gradients of the head.
//
// With `group`, the name of a process group, its ranks have the rows of `weight` and `bias` of different classes, and
// `classes` is the number of all. Results and d input are the same on all ranks. With sequence_dim, input and d input
// are this rank's part along that dimension.

#include "core/operator.h"
#include "ops/losses/linear/checks.h"
#include "ops/losses/linear/fused_linear_log_probs.h"

namespace liger::ops::fused_linear_log_probs {
namespace {

using core::value_or_undefined;

struct Cpu {
  static constexpr Device device{log_probs::forward_cpu, log_probs::backward_cpu};
};
struct Cuda {
  static constexpr Device device{log_probs::forward_cuda, log_probs::backward_cuda};
};
struct Meta {
  static constexpr Device device{};
};

constexpr const char *kOp = "fused_linear_log_probs", *kWithSum = "fused_linear_log_probs_with_log_sum_exp",
                     *kBackward = "fused_linear_log_probs backward";

/// Of `wanted`, beside the gradients.
constexpr int64_t kLogSumExp = 1 << 5;

Call check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    double logits_scale, std::optional<double> softcap, double temperature, int64_t ignore_index, bool entropy,
    bool entropy_grad, bool mean_logits, bool log_sum_sq_probs, bool is_top1, std::optional<int64_t> memory_budget,
    c10::string_view group, int64_t all_classes, ClassSizes sizes, std::optional<int64_t> sequence_dim,
    const OptionalTensor& low_rank_input, const OptionalTensor& low_rank_weight) {
  Vocabulary vocabulary = core::parse_vocabulary(op, group, all_classes, sizes);
  sequence_dim = check_sequence_dim(op, "input", input, sequence_dim, vocabulary);
  check_finite(op, "logits_scale", logits_scale);
  check_positive(op, "softcap", softcap);
  check_positive(op, "temperature", temperature);
  check_memory_budget(op, memory_budget);
  Call call{
      {logits_scale,
       {temperature, ignore_index, softcap},
       entropy,
       entropy_grad,
       mean_logits,
       log_sum_sq_probs,
       is_top1,
       false,
       memory_budget,
       std::move(vocabulary),
       sequence_dim},
      op,
      input,
      weight,
      target,
      value_or_undefined(bias),
      value_or_undefined(low_rank_input),
      value_or_undefined(low_rank_weight)};
  HeadCheck{op, "", call.trained(), "input", input}(target, sequence_dim, /*may_be_narrow=*/true);
  check_target(op, input, weight, target, sequence_dim, true);
  return call;
}

/// wanted: what backward will need. Nothing: only the results.
Forward empty_forward(const Call& call, WantedGradients wanted) {
  const auto numbers = call.input.options().dtype(compute_type(call.input));
  const auto tokens = call.target.sym_sizes().slice(0, call.input.dim() - 1);
  auto if_wanted = [&](bool is, c10::SymIntArrayRef sizes, at::TensorOptions options) {
    return is ? at::empty_symint(sizes, options) : at::empty({0}, options);
  };
  Forward out;
  out.rows.log_probs = at::empty_symint(call.target.sym_sizes(), numbers);
  out.rows.entropy = if_wanted(call.entropy, tokens, numbers);
  out.rows.mean_logits = if_wanted(call.mean_logits, tokens, numbers);
  out.rows.log_sum_sq_probs = if_wanted(call.log_sum_sq_probs, tokens, numbers);
  out.rows.is_top1 = if_wanted(call.is_top1, call.target.sym_sizes(), numbers.dtype(at::kBool));
  out.log_sum_exp = if_wanted(call.log_sum_exp, tokens, numbers);
  if (!wanted.any() && !call.log_sum_exp) return out;
  c10::SymDimVector three(tokens.begin(), tokens.end());
  three.push_back(3);
  out.rows.stats = at::empty_symint(three, numbers);
  out.rows.chosen = at::empty_symint(call.target.sym_sizes(), numbers);
  if (wanted.input && !wanted.head() && !call.sequence_dim) {
    c10::SymIntArrayRef sizes = call.input.sym_sizes();
    out.of_log_probs = at::empty_symint(sizes, call.input.options());
    if (call.entropy && call.entropy_grad) out.of_entropy = at::empty_symint(sizes, call.input.options());
  }
  return out;
}

/// Of log-probabilities, entropy and log-sum-exp.
ResultGradients check_upstream(
    const Tensor& target, int64_t token_dims, const OptionalTensor& grad, const OptionalTensor& grad_entropy,
    const OptionalTensor& grad_log_sum_exp) {
  auto checked = [&](const char* name, const OptionalTensor& g, c10::SymIntArrayRef sizes) {
    if (!g || !g->defined()) return Tensor();
    check_same_device(kBackward, name, *g, "target", target);
    LIGER_CHECK(g->sym_sizes().equals(sizes), kBackward, name, c10::str("have shape ", sizes), g->sym_sizes());
    return *g;
  };
  const auto tokens = target.sym_sizes().slice(0, token_dims);
  return {
      checked("the log-probabilities' gradient", grad, target.sym_sizes()),
      checked("the entropy's gradient", grad_entropy, tokens),
      checked("the log-sum-exp's gradient", grad_log_sum_exp, tokens)};
}

/// d input of a frozen head. It may overwrite of_log_probs.
struct Scale
    : core::Private<
          Scale,
          Tensor(
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
              const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
              std::optional<double>, double, int64_t, bool, c10::string_view, int64_t, ClassSizes),
          core::Overwrites<3>> {
  static constexpr const char* kName = "_fused_linear_log_probs_scale";
  static constexpr const char* kArguments =
      "grad, grad_entropy, grad_log_sum_exp, of_log_probs, of_entropy, target, weight, stats, chosen, logits_scale, "
      "softcap, temperature, ignore_index, log_sum_exp, group, classes, class_sizes";

  template <class On>
  static Tensor run(
      const Into& into, const OptionalTensor& grad, const OptionalTensor& grad_entropy,
      const OptionalTensor& grad_log_sum_exp, const Tensor& of_log_probs, const OptionalTensor& of_entropy,
      const Tensor& target, const OptionalTensor& weight, const OptionalTensor& stats, const OptionalTensor& chosen,
      double logits_scale, std::optional<double> softcap, double temperature, int64_t ignore_index, bool log_sum_exp,
      c10::string_view group, int64_t classes, ClassSizes sizes) {
    const auto given = check_upstream(target, of_log_probs.dim() - 1, grad, grad_entropy, grad_log_sum_exp);
    Tensor out = into[0].defined() ? into[0] : at::empty_like(of_log_probs);
    Settings s{};
    s.logits_scale = logits_scale;
    s.o = {temperature, ignore_index, softcap};
    s.log_sum_exp = log_sum_exp;
    s.vocabulary = core::parse_vocabulary(kBackward, group, classes, sizes);
    if constexpr (On::device.forward != nullptr) {
      scale_rows(
          kBackward, given, of_log_probs, value_or_undefined(of_entropy), target, value_or_undefined(weight),
          value_or_undefined(stats), value_or_undefined(chosen), s, out);
    }
    return out;
  }
};

using Plain = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using WithSum = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using ForwardResults = decltype(copies(Forward().tie()));

consteval size_t at(std::string_view argument) { return core::position(schemas::fused_linear_log_probs, argument); }
/// Among the options of a call.
consteval size_t option(std::string_view argument) { return at(argument) - at("logits_scale"); }

/// Of the types of arguments, see Split.
template <class Tensors, class Options>
struct Ops;

template <class... T, class... O>
struct Ops<void(T...), void(O...)> {
  struct Fwd : core::Private<Fwd, ForwardResults(T..., O..., int64_t)> {
    static constexpr const char *kName = "_fused_linear_log_probs_fwd", *kPublic = schemas::fused_linear_log_probs,
                                *kArguments = "input..., wanted";

    template <class On>
    static ForwardResults run(T... tensors, O... options, int64_t wanted) {
      const bool sums = wanted & kLogSumExp;
      Call call = check(sums ? kWithSum : kOp, tensors..., options...);
      call.log_sum_exp = sums;
      const auto gradients = WantedGradients::from_bits(wanted);
      Forward out = empty_forward(call, gradients);
      if constexpr (On::device.forward != nullptr) forward(On::device, call, gradients, out);
      return copies(out.tie());
    }
  };

  struct Bwd : core::Private<
                   Bwd,
                   FiveGradients(
                       const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, T..., const Tensor&,
                       const Tensor&, O..., int64_t)> {
    static constexpr const char
        *kName = "_fused_linear_log_probs_bwd",
        *kPublic = schemas::fused_linear_log_probs,
        *kArguments = "grad, grad_entropy, grad_log_sum_exp, input...bias, stats, chosen, logits_scale..., wanted";

    template <class On>
    static FiveGradients run(
        const OptionalTensor& grad, const OptionalTensor& grad_entropy, const OptionalTensor& grad_log_sum_exp,
        T... tensors, const Tensor& stats, const Tensor& chosen, O... options, int64_t wanted) {
      const Call call = check(kBackward, tensors..., options...);
      const auto given = check_upstream(call.target, call.input.dim() - 1, grad, grad_entropy, grad_log_sum_exp);
      Gradients out = empty_gradients(call.trained(), WantedGradients::from_bits(wanted));
      if constexpr (On::device.forward != nullptr) {
        backward(On::device, call, given, stats.contiguous(), chosen.contiguous(), out);
      }
      return copies(out.tie());
    }
  };

  /// input, weight, target, bias, stats, chosen, of_log_probs, of_entropy, low_rank_input, low_rank_weight. kSums: with
  /// log_sum_exp.
  template <bool kSums>
  struct Node : core::BackwardNode<Node<kSums>, 10> {
    decltype(std::tuple_cat(core::stored<O>(std::declval<O>())...)) options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    void record(
        const ForwardResults& results, const Tensor& input, const Tensor& weight, const Tensor& target,
        const OptionalTensor& bias, O... rest) {
      Forward out;
      out.tie() = results;
      const auto all = std::tie(rest...);
      const bool entropy = std::get<option("entropy")>(all), entropy_grad = std::get<option("entropy_grad")>(all);
      // Saved only if backward reads it.
      const bool recomputes = !out.of_log_probs.defined() || (entropy && !entropy_grad);
      const bool reads_head = recomputes || kSums || has_several_ids(input, target);
      auto if_read = [](const OptionalTensor& t, bool read) { return read ? t : OptionalTensor(); };
      this->save(
          if_read(input, recomputes), if_read(weight, reads_head), target, if_read(bias, recomputes),
          if_read(out.rows.stats, reads_head), if_read(out.rows.chosen, reads_head), out.of_log_probs, out.of_entropy,
          if_read(std::get<option("low_rank_input")>(all), recomputes),
          if_read(std::get<option("low_rank_weight")>(all), recomputes));
      this->connect(out.rows.log_probs);
      if (entropy) this->connect(out.rows.entropy);
      if (kSums) this->connect(out.log_sum_exp);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      // The first is that of log-probabilities. The others are here if their results are.
      const Tensor none, &grad = grads[0], &grad_entropy = std::get<option("entropy")>(options) ? grads[1] : none,
                         &grad_log_sum_exp = kSums ? grads.back() : none;
      if (!grad.defined() && !grad_entropy.defined() && !grad_log_sum_exp.defined()) return core::variable_list(5);
      auto next = [this, i = 0]() mutable { return this->take(i++); };
      const Tensor input = next(), weight = next(), target = next(), bias = next(), stats = next(), chosen = next();
      Tensor of_log_probs = next();
      const Tensor of_entropy = next(), low_rank_input = next(), low_rank_weight = next();
      return core::with_options(options, [&](const auto&... o) -> core::variable_list {
        if (!of_log_probs.defined() || (grad_entropy.defined() && !of_entropy.defined())) {
          return listed(
              Bwd::call(
                  grad, grad_entropy, grad_log_sum_exp, input, weight, target, bias, stats, chosen, o...,
                  low_rank_input, low_rank_weight, this->wanted()));
        }
        const auto all = std::tie(o...);
        return {
            Scale::call(
                this->may_overwrite(of_log_probs, of_log_probs), grad, grad_entropy, grad_log_sum_exp, of_log_probs,
                of_entropy, target, weight, stats, chosen, std::get<option("logits_scale")>(all),
                std::get<option("softcap")>(all), std::get<option("temperature")>(all),
                std::get<option("ignore_index")>(all), kSums, std::get<option("group")>(all),
                std::get<option("classes")>(all), std::get<option("class_sizes")>(all)),
            Tensor(), Tensor(), Tensor(), Tensor()};
      });
    }
  };

  /// The operator that returns R.
  template <class R>
  struct Form : core::Operator<Form<R>, R(T..., O...)> {
    static constexpr bool kSums = std::is_same_v<R, WithSum>;
    static constexpr const char *kOp = kSums ? kWithSum : fused_linear_log_probs::kOp,
                                *kSchema = kSums ? schemas::fused_linear_log_probs_with_log_sum_exp
                                                 : schemas::fused_linear_log_probs;
    static constexpr int64_t kWanted = kSums ? kLogSumExp : 0;
    using Edges = core::Positions<at("input"), at("weight"), at("bias"), at("low_rank_input"), at("low_rank_weight")>;
    // Casts the arguments that F.linear casts. Results are fp32 in any case.
    using Autocast = core::AutocastLinear<at("input"), at("weight"), at("bias")>;
    using Node = Ops::Node<kSums>;
    // Of both forms.
    using Privates = std::conditional_t<kSums, core::Privates<>, core::Privates<Fwd, Bwd, Scale>>;
    using Cpu = fused_linear_log_probs::Cpu;
    using Cuda = fused_linear_log_probs::Cuda;
    using Meta = fused_linear_log_probs::Meta;

    template <class On>
    static ForwardResults run(bool, T... tensors, O... options) {
      return Fwd::template run<On>(tensors..., options..., kWanted);
    }

    static ForwardResults run_forward(T... tensors, O... options) {
      const int64_t wanted = kWanted | required(Edges(), tensors..., options...);
      at::AutoDispatchBelowADInplaceOrView below;
      return Fwd::call(tensors..., options..., wanted);
    }
  };
};

using Types = Split<at("bias") + 1, decltype(check)>;
using Linear = Ops<Types::Tensors, Types::Options>;

}  // namespace

LIGER_OPERATOR(Linear::Form<Plain>)
LIGER_OPERATOR(Linear::Form<WithSum>)

}  // namespace liger::ops::fused_linear_log_probs
