// fused_linear_divergence(s_input, s_weight, t_input, t_weight, ...): the divergence of a student's predictions from a
// teacher's, and the student's entropy, from logits that exist for a part of the tokens at a time,
//
//   logits = softcap(logits_scale * (input @ weight.T + low_rank_input @ low_rank_weight.T + bias)) / temperature
//
// s_input: (..., Hs), s_weight: (V, Hs), t_input: (..., Ht), t_weight: (V, Ht), s_bias, t_bias: (V,), mask: (...) bool,
// token_weight: (...). {s,t}_low_rank_input: (..., R) and {s,t}_low_rank_weight: (V, R), of adapters. vocab_map: (V,),
// if the teacher has other classes: the teacher's class of each of the student's. Only for beta 0; the divergence is
// then the sum over these classes, under the teacher's softmax over all of its own. The tensors of one model have one
// dtype; the models may differ. beta 0: KL(teacher || student), 1: KL(student || teacher), between: the Jensen-Shannon
// divergence with the mixture (1 - beta) p_s + beta p_t. Only the divergence has a gradient, by the student's tensors.
//
// A reduced divergence computes the gradients in forward: four GEMMs, or six if small chunks would round d weight too
// often. Backward multiplies them by the incoming gradient, on the device, and writes nothing if that is 1. Per token,
// the gradient of the input alone is also computed in forward, because it is linear in each token's incoming gradient:
// three GEMMs. With a trained head, backward computes the logits again: six GEMMs.
//
// fp16 cannot represent small gradients: see fused_linear_cross_entropy.cpp on the deferred scale.
//
// With `group`, the name of a process group, its ranks have the rows of the weights and biases of different classes,
// and `classes` is the number of all. Results and d input are the same on all ranks. With sequence_dim, both inputs and
// d input are this rank's equal part along that dimension.

#include <cmath>

#include "core/operator.h"
#include "core/values.h"
#include "ops/losses/linear/fused_linear_divergence.h"
#include "ops/losses/linear/checks.h"
#include "ops/losses/linear/node.h"

namespace liger::ops::fused_linear_divergence {
namespace {

using core::ClassSizes;
using core::Vocabulary;

struct Cpu {
  static constexpr RowsOn* rows = rows_cpu;
};
struct Cuda {
  static constexpr RowsOn* rows = rows_cuda;
};
struct Meta {
  static constexpr RowsOn* rows = nullptr;
};

constexpr const char *kOp = "fused_linear_divergence", *kBackward = "fused_linear_divergence backward";

// ---- Checks

void check_arguments(const char* op, const Arguments& a, Options& o) {
  o.sequence_dim = check_sequence_dim(op, "s_input", a.s_input, o.sequence_dim, o.vocabulary);
  HeadCheck{op, "s_", a.trained(), "s_input", a.s_input}(a.t_input, o.sequence_dim);
  HeadCheck{op, "t_", a.teacher(), "s_input", a.s_input}(a.s_input, o.sequence_dim);
  const auto local = a.s_input.sym_sizes().slice(0, a.s_input.dim() - 1);
  LIGER_CHECK(
      a.t_input.sym_sizes().slice(0, a.t_input.dim() - 1).equals(local), op, "t_input",
      c10::str("have shape ", local, " and one dimension more, like s_input"), a.t_input.sym_sizes(),
      core::hint_if_swapped("s_input", a.s_input, "s_weight", a.s_weight, a.t_input),
      core::hint_if_swapped("t_input", a.t_input, "t_weight", a.t_weight, a.s_input));
  const auto classes = a.s_weight.sym_size(0);
  if (a.vocab_map.defined()) {
    check_integers(op, "vocab_map", a.vocab_map);
    check_same_device(op, "vocab_map", a.vocab_map, "s_input", a.s_input);
    LIGER_CHECK(
        a.vocab_map.dim() == 1 && a.vocab_map.sym_size(0) == classes, op, "vocab_map",
        c10::str("have shape [", classes, "], one teacher class per student class"), a.vocab_map.sym_sizes());
    LIGER_CHECK(o.kind() == kinds::FORWARD, op, "vocab_map", "be None unless beta is 0", o.beta);
    LIGER_CHECK(!o.vocabulary.is_split(), op, "vocab_map", "be None with a group", "both");
  } else {
    LIGER_CHECK(
        a.t_weight.sym_size(0) == classes, op, "t_weight", c10::str("have ", classes, " classes like s_weight"),
        a.t_weight.sym_size(0));
  }
  const auto sizes = token_sizes(op, a.s_input, o);
  const c10::SymIntArrayRef tokens = sizes;
  const char* of_ranks = o.sequence_dim ? ", with the positions of all ranks" : "";
  if (a.mask.defined()) {
    check_dense(op, "mask", a.mask);
    check_same_device(op, "mask", a.mask, "s_input", a.s_input);
    LIGER_CHECK(
        a.mask.sym_sizes().equals(tokens), op, "mask",
        c10::str("have shape ", tokens, ", that of s_input without its last dimension", of_ranks), a.mask.sym_sizes());
    LIGER_CHECK(a.mask.scalar_type() == at::kBool, op, "mask", "be bool", a.mask.scalar_type());
  }
  check_token_weight(op, a.token_weight, "s_input", a.s_input, tokens, of_ranks);
}

Options parse(
    const char* op, double beta, double temperature, double s_scale, std::optional<double> s_softcap, double t_scale,
    std::optional<double> t_softcap, c10::string_view reduction, std::optional<int64_t> memory_budget,
    Vocabulary vocabulary, std::optional<int64_t> sequence_dim) {
  LIGER_CHECK(beta >= 0 && beta <= 1, op, "beta", "be between 0 and 1", beta);
  check_positive(op, "temperature", temperature);
  check_finite(op, "s_logits_scale", s_scale);
  check_finite(op, "t_logits_scale", t_scale);
  check_positive(op, "s_softcap", s_softcap);
  check_positive(op, "t_softcap", t_softcap);
  const auto kind = parse_reduction(op, reduction);
  check_memory_budget(op, memory_budget);
  return {beta, temperature,   {s_scale, s_softcap},  {t_scale, t_softcap},
          kind, memory_budget, std::move(vocabulary), sequence_dim};
}

// ---- Results

Results empty_results(const Call& call, Wanted wanted) {
  const auto& [op, a, o, tokens] = call;
  Results out;
  out.divergence = at::empty_symint(o.reduced() ? c10::SymIntArrayRef() : c10::SymIntArrayRef(tokens), a.numbers());
  out.entropy = at::empty_symint(tokens, a.numbers());
  if (computes_now(o, wanted)) {
    out.gradients = empty_gradients(a.trained(), wanted);
    const bool half = a.s_input.scalar_type() == at::kHalf;
    if (half && o.reduced()) out.deferred_scale = at::empty({2}, a.numbers());
  } else if (wanted.any()) {
    out.stats = at::empty_symint({5, out.entropy.sym_numel()}, a.numbers());
  }
  return out;
}

// ---- The dispatched ops

using Two = std::tuple<Tensor, Tensor>;
using ForwardResults = decltype(copies(Results().tie()));

Call check(
    const char* op, const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, double beta, double temperature, double s_logits_scale,
    std::optional<double> s_softcap, double t_logits_scale, std::optional<double> t_softcap, const OptionalTensor& mask,
    c10::string_view reduction, const OptionalTensor& token_weight, std::optional<int64_t> memory_budget,
    c10::string_view group, int64_t classes, ClassSizes sizes, std::optional<int64_t> sequence_dim,
    const OptionalTensor& vocab_map, const OptionalTensor& s_low_rank_input, const OptionalTensor& s_low_rank_weight,
    const OptionalTensor& t_low_rank_input, const OptionalTensor& t_low_rank_weight) {
  Call call{
      op,
      {s_input, s_weight, t_input, t_weight, value_or_undefined(s_bias), value_or_undefined(t_bias),
       value_or_undefined(mask), value_or_undefined(token_weight), value_or_undefined(vocab_map),
       value_or_undefined(s_low_rank_input), value_or_undefined(s_low_rank_weight),
       value_or_undefined(t_low_rank_input), value_or_undefined(t_low_rank_weight)},
      parse(
          op, beta, temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, reduction, memory_budget,
          core::parse_vocabulary(op, group, classes, sizes), sequence_dim),
      {}};
  check_arguments(op, call.a, call.o);
  call.tokens = token_sizes(op, s_input, call.o);
  return call;
}

consteval size_t at(std::string_view argument) { return core::position(schemas::fused_linear_divergence, argument); }

/// Of the types of arguments, see Split.
template <class Tensors, class Options>
struct Ops;

template <class... T, class... O>
struct Ops<void(T...), void(O...)> : core::Operator<Ops<void(T...), void(O...)>, Two(T..., O...)> {
  static constexpr const char *kOp = fused_linear_divergence::kOp, *kSchema = schemas::fused_linear_divergence;
  using Edges =
      core::Positions<at("s_input"), at("s_weight"), at("s_bias"), at("s_low_rank_input"), at("s_low_rank_weight")>;
  using Constants = core::Positions<
      at("t_input"), at("t_weight"), at("t_bias"), at("token_weight"), at("t_low_rank_input"), at("t_low_rank_weight")>;
  // Casts the arguments that F.linear casts. The divergence is fp32 in any case.
  using Autocast = core::AutocastLinear<0, 1, 2, 3, 4, 5>;
  using Cpu = fused_linear_divergence::Cpu;
  using Cuda = fused_linear_divergence::Cuda;
  using Meta = fused_linear_divergence::Meta;

  /// total: what a mean divides by, if it is not the sum of this call's weights.
  struct Fwd : core::Private<Fwd, ForwardResults(T..., const OptionalTensor&, O..., int64_t)> {
    static constexpr const char *kName = "_fused_linear_divergence_fwd", *kPublic = schemas::fused_linear_divergence,
                                *kArguments = "s_input...t_bias, total, beta..., wanted";

    template <class On>
    static ForwardResults run(T... tensors, const OptionalTensor& total, O... options, int64_t wanted) {
      const Call call = check(kOp, tensors..., options...);
      Results out = empty_results(call, Wanted::from_bits(wanted));
      if constexpr (On::rows != nullptr) {
        core::check_range(kOp, "vocab_map", call.a.vocab_map, 0, call.a.t_weight.size(0));
        forward(call, On::rows, value_or_undefined(total), out);
      }
      return copies(out.tie());
    }
  };

  struct Bwd : core::Private<Bwd, FiveGradients(const Tensor&, T..., const Tensor&, O..., int64_t)> {
    static constexpr const char *kOp = fused_linear_divergence::kOp, *kName = "_fused_linear_divergence_bwd",
                                *kPublic = schemas::fused_linear_divergence,
                                *kArguments = "grad, s_input...t_bias, stats, beta..., wanted";

    template <class On>
    static FiveGradients run(const Tensor& grad, T... tensors, const Tensor& stats, O... options, int64_t wanted) {
      const Call call = check(kBackward, tensors..., options...);
      Gradients out = empty_gradients(call.a.trained(), Wanted::from_bits(wanted));
      if constexpr (On::rows != nullptr) backward(call, On::rows, grad, stats.contiguous(), out);
      return copies(out.tie());
    }
  };

  using Privates = core::Privates<Fwd, Bwd>;

  template <class On>
  static ForwardResults run(bool, T... tensors, O... options) {
    return Fwd::template run<On>(tensors..., {}, options..., 0);
  }

  static ForwardResults run_forward(T... tensors, O... options) {
    const int64_t wanted = required(Edges(), tensors..., options...);
    at::AutoDispatchBelowADInplaceOrView below;
    return Fwd::call(tensors..., {}, options..., wanted);
  }

  struct Node : LinearNode<Node, Bwd, T..., const Tensor&, O...> {
    using Base = LinearNode<Node, Bwd, T..., const Tensor&, O...>;

    void record(const ForwardResults& results, T... tensors, O... options) {
      Results out;
      out.tie() = results;
      this->keep(out.gradients, out.deferred_scale, tensors..., out.stats, options...);
      this->connect(out.divergence);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      Tensor grad = grads[0];
      if (!this->has_gradients || !grad.defined() || grad.dim() == 0) return Base::backward(std::move(grads));
      // Of each token. Forward has computed the gradient of input for incoming gradients of 1.
      auto of_input = [](Tensor t) { return core::variable_list{std::move(t), {}, {}, {}, {}}; };
      const auto& [group] = std::get<at("group") + 1>(this->kept);
      const auto& [sequence_dim] = std::get<at("sequence_dim") + 1>(this->kept);
      Tensor gradient = this->take(0);
      if (sequence_dim) {
        const int64_t dim = at::maybe_wrap_dim(*sequence_dim, gradient.dim());
        const auto count = gradient.sym_size(dim);
        grad = grad.narrow_symint(dim, count * core::Group(kOp, group).rank(), count);
      }
      Tensor factor = grad.unsqueeze(-1);
      if (!core::is_plain(gradient)) return of_input(at::mul(gradient, factor).to(gradient.scalar_type()));
      // Both multiply in the wider dtype, without a tensor of it.
      if (this->may_overwrite(gradient, gradient)) return of_input(gradient.mul_(factor));
      Tensor out = at::empty_like(gradient);
      return of_input(at::mul_out(out, gradient, factor));
    }
  };
};

using Types = linear::Split<at("t_bias") + 1, decltype(check)>;
using Linear = Ops<Types::Tensors, Types::Options>;

}  // namespace

LIGER_OPERATOR(Linear)

}  // namespace liger::ops::fused_linear_divergence
