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

#include "core/values.h"
#include "ops/losses/forms.h"
#include "ops/losses/fused_linear_divergence_pass.h"
#include "ops/losses/linear_reduced.h"

namespace liger::ops::fused_linear_divergence {
namespace {

using cross_entropy::ClassSizes;
using cross_entropy::Vocabulary;

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

void check_model(
    const char* op, const char* input_name, const char* weight_name, const char* bias_name, const Tensor& input,
    const Tensor& weight, const Tensor& bias, const Tensor& like, const Tensor& other_input) {
  check_activation(op, input_name, input);
  check_same_device(op, input_name, input, "s_input", like);
  check_dense(op, weight_name, weight);
  check_same_device(op, weight_name, weight, "s_input", like);
  LIGER_CHECK(
      weight.scalar_type() == input.scalar_type(), op, weight_name,
      c10::str("have the dtype of ", input_name, ", ", input.scalar_type()), weight.scalar_type());
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, weight_name,
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of ", input_name),
      weight.sym_sizes(), core::hint_if_swapped(input_name, input, weight_name, weight, other_input));
  if (!bias.defined()) return;
  check_dense(op, bias_name, bias);
  check_same_device(op, bias_name, bias, "s_input", like);
  LIGER_CHECK(
      bias.scalar_type() == input.scalar_type(), op, bias_name,
      c10::str("have the dtype of ", input_name, ", ", input.scalar_type()), bias.scalar_type());
  LIGER_CHECK(
      bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), op, bias_name,
      c10::str("have shape [", weight.sym_size(0), "], one value per class"), bias.sym_sizes());
}

void check_arguments(const char* op, const Arguments& a, Options& o) {
  check_model(op, "s_input", "s_weight", "s_bias", a.s_input, a.s_weight, a.s_bias, a.s_input, a.t_input);
  check_model(op, "t_input", "t_weight", "t_bias", a.t_input, a.t_weight, a.t_bias, a.s_input, a.s_input);
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
  o.sequence_dim = check_sequence_dim(op, "s_input", a.s_input, o.sequence_dim, o.vocabulary);
  check_low_rank(op, "s_", a.s_input, a.s_weight, a.s_low_rank_input, a.s_low_rank_weight, o.sequence_dim);
  check_low_rank(op, "t_", a.t_input, a.t_weight, a.t_low_rank_input, a.t_low_rank_weight, o.sequence_dim);
  const auto sizes = token_sizes(op, a.s_input, o);
  const c10::SymIntArrayRef tokens = sizes;
  const char* of_ranks = o.sequence_dim ? ", with the positions of all ranks" : "";
  auto check_tokens = [&](const char* name, const Tensor& t) {
    check_dense(op, name, t);
    check_same_device(op, name, t, "s_input", a.s_input);
    LIGER_CHECK(
        t.sym_sizes().equals(tokens), op, name,
        c10::str("have shape ", tokens, ", that of s_input without its last dimension", of_ranks), t.sym_sizes());
  };
  if (a.mask.defined()) {
    check_tokens("mask", a.mask);
    LIGER_CHECK(a.mask.scalar_type() == at::kBool, op, "mask", "be bool", a.mask.scalar_type());
  }
  if (a.token_weight.defined()) {
    check_tokens("token_weight", a.token_weight);
    LIGER_CHECK(
        at::isFloatingType(a.token_weight.scalar_type()), op, "token_weight", "be floating point",
        a.token_weight.scalar_type());
  }
}

Options parse(
    const char* op, double beta, double temperature, double s_scale, std::optional<double> s_softcap, double t_scale,
    std::optional<double> t_softcap, c10::string_view reduction, std::optional<int64_t> memory_budget,
    Vocabulary vocabulary, std::optional<int64_t> sequence_dim) {
  LIGER_CHECK(beta >= 0 && beta <= 1, op, "beta", "be between 0 and 1", beta);
  LIGER_CHECK(temperature > 0 && std::isfinite(temperature), op, "temperature", "be positive and finite", temperature);
  LIGER_CHECK(std::isfinite(s_scale), op, "s_logits_scale", "be finite", s_scale);
  LIGER_CHECK(std::isfinite(t_scale), op, "t_logits_scale", "be finite", t_scale);
  auto check_cap = [&](const char* name, std::optional<double> cap) {
    LIGER_CHECK(!cap || (*cap > 0 && std::isfinite(*cap)), op, name, "be positive and finite", *cap);
  };
  check_cap("s_softcap", s_softcap);
  check_cap("t_softcap", t_softcap);
  LIGER_CHECK(
      reduction == "mean" || reduction == "sum" || reduction == "none", op, "reduction", "be 'mean', 'sum' or 'none'",
      "'", reduction, "'");
  LIGER_CHECK(
      !memory_budget || *memory_budget > 0, op, "memory_budget", "be a positive number of bytes", *memory_budget);
  const auto kind = reduction == "mean" ? Reduction::Mean : reduction == "sum" ? Reduction::Sum : Reduction::None;
  return {beta, temperature,   {s_scale, s_softcap},  {t_scale, t_softcap},
          kind, memory_budget, std::move(vocabulary), sequence_dim};
}

// ---- Results

Results empty_results(const Arguments& a, const Options& o, c10::SymIntArrayRef tokens, Wanted wanted) {
  Results out;
  out.divergence = at::empty_symint(o.reduced() ? c10::SymIntArrayRef() : tokens, a.numbers());
  out.entropy = at::empty_symint(tokens, a.numbers());
  if (computes_now(o, wanted)) {
    out.gradients = empty_gradients(a.s_input, a.s_weight, a.s_bias, wanted, a.s_low_rank_input, a.s_low_rank_weight);
    const bool half = a.s_input.scalar_type() == at::kHalf;
    if (half && o.reduced()) out.deferred_scale = at::empty({2}, a.numbers());
  } else if (wanted.any()) {
    out.stats = at::empty_symint({5, out.entropy.sym_numel()}, a.numbers());
  }
  return out;
}

// ---- Backward nodes

struct FrozenHeadNode : core::BackwardNode<FrozenHeadNode, 1> {  // gradient of input for incoming gradients of 1
  std::string group;
  std::optional<int64_t> sequence_dim;

  auto state() { return std::tie(group, sequence_dim); }

  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    auto of_input = [](Tensor t) { return core::variable_list{std::move(t), Tensor(), Tensor(), Tensor(), Tensor()}; };
    if (!grad.defined()) return of_input(Tensor());
    Tensor gradient = take(0);
    if (sequence_dim) {
      const auto count = gradient.sym_size(*sequence_dim);
      grad = grad.narrow_symint(*sequence_dim, count * core::Group(kOp, group).rank(), count);
    }
    Tensor factor = grad.unsqueeze(-1);
    if (!core::is_plain(gradient)) return of_input(at::mul(gradient, factor).to(gradient.scalar_type()));
    // Both multiply in the wider dtype, without a tensor of it.
    if (may_overwrite(gradient, gradient)) return of_input(gradient.mul_(factor));
    Tensor out = at::empty_like(gradient);
    return of_input(at::mul_out(out, gradient, factor));
  }
};

/// s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, vocab_map, stats, s_low_rank_input,
/// s_low_rank_weight, t_low_rank_input, t_low_rank_weight
struct TrainedHeadNode : core::BackwardNode<TrainedHeadNode, 14> {
  Options o{};
  int64_t wanted = 0;

  auto state() {
    return std::tuple_cat(
        std::tie(
            o.beta, o.temperature, o.student.scale, o.student.softcap, o.teacher.scale, o.teacher.softcap,
            o.memory_budget, o.sequence_dim, wanted),
        o.vocabulary.tie());
  }

  std::string name() const override { return kOp; }
  core::variable_list backward(core::variable_list&& grads) override;
};

// ---- The dispatched ops

using Two = std::tuple<Tensor, Tensor>;

/// O: the types of the options in the schemas, from beta on.
template <class... O>
struct Ops {
  using Cpu = fused_linear_divergence::Cpu;
  using Cuda = fused_linear_divergence::Cuda;
  using Meta = fused_linear_divergence::Meta;
  // Casts the arguments that F.linear casts. The divergence is fp32 in any case.
  using Autocast = core::AutocastLinear<0, 1, 2, 3, 4, 5>;

  template <class>
  static constexpr const char* name() {
    return kOp;
  }
  template <class>
  static constexpr const char* schema() {
    return schemas::fused_linear_divergence;
  }

  struct Call {
    Arguments a;
    Options o;
    c10::SymDimVector tokens;
  };

  static Call check(
      const char* op, const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
      const OptionalTensor& s_bias, const OptionalTensor& t_bias, double beta, double temperature,
      double s_logits_scale, std::optional<double> s_softcap, double t_logits_scale, std::optional<double> t_softcap,
      const OptionalTensor& mask, c10::string_view reduction, const OptionalTensor& token_weight,
      std::optional<int64_t> memory_budget, c10::string_view group, int64_t classes, ClassSizes sizes,
      std::optional<int64_t> sequence_dim, const OptionalTensor& vocab_map, const OptionalTensor& s_low_rank_input,
      const OptionalTensor& s_low_rank_weight, const OptionalTensor& t_low_rank_input,
      const OptionalTensor& t_low_rank_weight) {
    Call call{
        {s_input, s_weight, t_input, t_weight, value_or_undefined(s_bias), value_or_undefined(t_bias),
         value_or_undefined(mask), value_or_undefined(token_weight), value_or_undefined(vocab_map),
         value_or_undefined(s_low_rank_input), value_or_undefined(s_low_rank_weight),
         value_or_undefined(t_low_rank_input), value_or_undefined(t_low_rank_weight)},
        parse(
            op, beta, temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, reduction, memory_budget,
            cross_entropy::parse_vocabulary(op, group, classes, sizes), sequence_dim),
        {}};
    check_arguments(op, call.a, call.o);
    call.tokens = token_sizes(op, s_input, call.o);
    return call;
  }

  template <class On>
  static Results run_call(const Call& call, Wanted wanted, const Tensor& total) {
    Results out = empty_results(call.a, call.o, call.tokens, wanted);
    if constexpr (On::rows != nullptr) {
      core::check_range(kOp, "vocab_map", call.a.vocab_map, 0, call.a.t_weight.size(0));
      forward(kOp, On::rows, call.a, call.o, C10_AS_INTARRAYREF_SLOW(call.tokens), total, out);
    }
    return out;
  }

  template <class On, class>
  static Two run(
      const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
      const OptionalTensor& s_bias, const OptionalTensor& t_bias, O... options) {
    const Results out =
        run_call<On>(check(kOp, s_input, s_weight, t_input, t_weight, s_bias, t_bias, options...), {}, Tensor());
    return {out.divergence, out.entropy};
  }

  template <class On>
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fwd(
      const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
      const OptionalTensor& s_bias, const OptionalTensor& t_bias, const OptionalTensor& total, O... options,
      int64_t wanted) {
    Results out = run_call<On>(
        check(kOp, s_input, s_weight, t_input, t_weight, s_bias, t_bias, options...), Wanted::from_bits(wanted),
        value_or_undefined(total));
    const Gradients& g = out.gradients;
    return {out.divergence,   out.entropy,       g.input,   g.weight,          g.bias,
            g.low_rank_input, g.low_rank_weight, out.stats, out.deferred_scale};
  }

  template <class On>
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(
      const Tensor& grad, const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
      const OptionalTensor& s_bias, const OptionalTensor& t_bias, const Tensor& stats, O... options, int64_t wanted) {
    const Call call = check(kBackward, s_input, s_weight, t_input, t_weight, s_bias, t_bias, options...);
    Gradients out = empty_gradients(
        s_input, s_weight, call.a.s_bias, Wanted::from_bits(wanted), call.a.s_low_rank_input, call.a.s_low_rank_weight);
    if constexpr (On::rows != nullptr) {
      backward(kBackward, On::rows, grad, call.a, call.o, C10_AS_INTARRAYREF_SLOW(call.tokens), stats, out);
    }
    return {out.input, out.weight, out.bias, out.low_rank_input, out.low_rank_weight};
  }

  template <class On>
  static void implement(torch::Library& m) {
    core::implement<fwd<On>>(m, "_fused_linear_divergence_fwd");
    core::implement<bwd<On>>(m, "_fused_linear_divergence_bwd");
  }

  // ---- Autograd

  /// std::nullopt if no argument requires a gradient.
  template <class>
  static std::optional<Two> with_graph(
      const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
      const OptionalTensor& s_bias, const OptionalTensor& t_bias, O... options) {
    core::check_dense(kOp, "s_input", s_input);
    core::check_dense(kOp, "s_weight", s_weight);
    core::check_dense(kOp, "t_input", t_input);
    core::check_dense(kOp, "t_weight", t_weight);
    const Call call = check(kOp, s_input, s_weight, t_input, t_weight, s_bias, t_bias, options...);
    const auto& [a, o, tokens] = call;
    core::check_no_forward_ad(
        kOp, s_input, s_weight, t_input, t_weight, s_bias, t_bias, a.token_weight, a.s_low_rank_input,
        a.s_low_rank_weight, a.t_low_rank_input, a.t_low_rank_weight);
    auto check_constant = [&](const char* name, const Tensor& t) {
      const bool learned = torch::autograd::compute_requires_grad(t);
      LIGER_CHECK(!learned, kOp, name, "not require a gradient", "one that does");
    };
    check_constant("t_input", t_input);
    check_constant("t_weight", t_weight);
    check_constant("t_bias", a.t_bias);
    check_constant("token_weight", a.token_weight);
    check_constant("t_low_rank_input", a.t_low_rank_input);
    check_constant("t_low_rank_weight", a.t_low_rank_weight);
    Wanted wanted;
    wanted.input = torch::autograd::compute_requires_grad(s_input);
    wanted.weight = torch::autograd::compute_requires_grad(s_weight);
    wanted.bias = torch::autograd::compute_requires_grad(s_bias);
    wanted.low_rank_input = torch::autograd::compute_requires_grad(a.s_low_rank_input);
    wanted.low_rank_weight = torch::autograd::compute_requires_grad(a.s_low_rank_weight);
    if (!wanted.any()) return std::nullopt;
    static const auto fwd_op = core::find_op<decltype(fwd<Meta>)>("_fused_linear_divergence_fwd");
    Results out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(
          out.divergence, out.entropy, out.gradients.input, out.gradients.weight, out.gradients.bias,
          out.gradients.low_rank_input, out.gradients.low_rank_weight, out.stats, out.deferred_scale) =
          fwd_op.call(s_input, s_weight, t_input, t_weight, s_bias, t_bias, {}, options..., wanted.bits());
    }
    auto edges = [&] {
      return torch::autograd::collect_next_edges(
          s_input, s_weight, s_bias, call.a.s_low_rank_input, call.a.s_low_rank_weight);
    };
    auto attach = [&](const auto& node) {
      node->set_next_edges(edges());
      torch::autograd::set_history(out.divergence, node);
    };
    if (o.reduced()) {
      connect_reduced(kOp, out.divergence, edges(), out.gradients, out.deferred_scale);
    } else if (computes_now(o, wanted)) {
      auto node = core::make_node<FrozenHeadNode>();
      node->save(out.gradients.input);
      node->group = o.vocabulary.group, node->sequence_dim = o.sequence_dim;
      attach(node);
    } else {
      auto node = core::make_node<TrainedHeadNode>();
      node->save(
          s_input, s_weight, t_input, t_weight, s_bias, t_bias, a.mask, a.token_weight, a.vocab_map, out.stats,
          a.s_low_rank_input, a.s_low_rank_weight, a.t_low_rank_input, a.t_low_rank_weight);
      node->o = o, node->wanted = wanted.bits();
      attach(node);
    }
    // Only the node may hold the gradients, so that backward can overwrite them.
    out.gradients = {};
    return Two(out.divergence, out.entropy);
  }

  using Form = ops::Form<
      Ops, Two, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
      const OptionalTensor&, O...>;
};

using Linear =
    Ops<double, double, double, std::optional<double>, double, std::optional<double>, const OptionalTensor&,
        c10::string_view, const OptionalTensor&, std::optional<int64_t>, c10::string_view, int64_t, ClassSizes,
        std::optional<int64_t>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&>;

core::variable_list TrainedHeadNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return core::variable_list(5);
  std::array<Tensor, 14> given;
  for (size_t i = 0; i < given.size(); ++i) given[i] = take(i);
  const auto& [s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, factor, map, stats, s_t, s_b, t_t, t_b] =
      given;
  const Vocabulary& v = o.vocabulary;
  static const auto op = core::find_op<decltype(Linear::bwd<Meta>)>("_fused_linear_divergence_bwd");
  auto [dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight] = op.call(
      grad, s_input, s_weight, t_input, t_weight, s_bias, t_bias, stats, o.beta, o.temperature, o.student.scale,
      o.student.softcap, o.teacher.scale, o.teacher.softcap, mask, "none", factor, o.memory_budget, v.group, v.classes,
      v.class_sizes(), o.sequence_dim, map, s_t, s_b, t_t, t_b, wanted);
  return {dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight};
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  const std::string models = "Tensor s_input, Tensor s_weight, Tensor t_input, Tensor t_weight, ";
  const std::string biases = "Tensor? s_bias, Tensor? t_bias, ";
  const std::string options =
      "float beta, float temperature, float s_logits_scale, float? s_softcap, float t_logits_scale, float? t_softcap, "
      "Tensor? mask, str reduction, Tensor? token_weight, int? memory_budget, str group, int classes, "
      "int[]? class_sizes, int? sequence_dim, Tensor? vocab_map, Tensor? s_low_rank_input, Tensor? s_low_rank_weight, "
      "Tensor? t_low_rank_input, Tensor? t_low_rank_weight, int wanted) -> ";
  core::define(
      m,
      "_fused_linear_divergence_fwd(" + models + biases + "Tensor? total, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_divergence_bwd(Tensor grad, " + models + biases + "Tensor stats, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

LIGER_LIBRARY_IMPL(CPU, m) { Linear::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { Linear::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { Linear::implement<Meta>(m); }

LIGER_OPERATOR(Linear::Form)

}  // namespace liger::ops::fused_linear_divergence
