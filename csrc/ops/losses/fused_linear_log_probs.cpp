// fused_linear_log_probs(input, weight, target, ...): log_probs of logits that exist for one chunk at a time,
//
//   z = softcap(logits_scale * (input @ weight.T + low_rank_input @ low_rank_weight.T + bias)) / temperature
//
// input: (..., H), weight: (V, H), target: (...) or (..., K) ids, bias: (V,), low_rank_input: (..., R) and
// low_rank_weight: (V, R), of an adapter. Returns log p of the ids and, where they are wanted, of each token the
// entropy, the mean of z, log(sum of p^2), and whether an id has the largest z. The first two have gradients. fp32
// input goes with a half-precision weight too.
//
// If only input requires a gradient, its gradient is linear in each token's upstream gradients: forward multiplies
// weight by the gradients of logits for an upstream gradient of 1, and backward scales the rows. Several ids of a token
// have different upstream gradients, so backward adds their rows of weight. The product for the entropy is made under
// entropy_grad; without it a gradient of the entropy makes backward compute the logits again, as it does for the
// gradients of the head.
//
// With `group`, the name of a process group, its ranks have the rows of `weight` and `bias` of different classes, and
// `classes` is the number of all. Results and d input are the same on all ranks. With sequence_dim, input and d input
// are this rank's part along that dimension.

#include "ops/losses/forms.h"
#include "ops/losses/fused_linear_log_probs.h"

namespace liger::ops::fused_linear_log_probs {
namespace {

using core::value_or_undefined;

constexpr Device kCpu{log_probs::forward_cpu, log_probs::backward_cpu};
constexpr Device kCuda{log_probs::forward_cuda, log_probs::backward_cuda};

struct Cpu {
  static constexpr const Device* device = &kCpu;
};
struct Cuda {
  static constexpr const Device* device = &kCuda;
};
struct Meta {
  static constexpr const Device* device = nullptr;
};

constexpr const char* kOp = "fused_linear_log_probs";

Settings check(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    double logits_scale, std::optional<double> softcap, double temperature, int64_t ignore_index, bool entropy,
    bool entropy_grad, bool mean_logits, bool log_sum_sq_probs, bool is_top1, std::optional<int64_t> memory_budget,
    c10::string_view group, int64_t all_classes, ClassSizes sizes, std::optional<int64_t> sequence_dim,
    const OptionalTensor& low_rank_input, const OptionalTensor& low_rank_weight) {
  Vocabulary vocabulary = cross_entropy::parse_vocabulary(op, group, all_classes, sizes);
  check_activation(op, "input", input);
  const auto dtype = input.scalar_type();
  auto check_head = [&](const char* name, const Tensor& t) {
    check_dense(op, name, t);
    check_same_device(op, name, t, "input", input);
    const bool narrower = dtype == at::kFloat && at::isReducedFloatingType(t.scalar_type());
    LIGER_CHECK(
        t.scalar_type() == dtype || narrower, op, name,
        c10::str("have the dtype of input, ", dtype, dtype == at::kFloat ? ", or be float16 or bfloat16" : ""),
        t.scalar_type());
  };
  check_head("weight", weight);
  LIGER_CHECK(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_sizes().back(), op, "weight",
      c10::str("have shape [classes, ", input.sym_sizes().back(), "], the last dimension of input"), weight.sym_sizes(),
      core::hint_if_swapped("input", input, "weight", weight, target));
  if (bias && bias->defined()) {
    check_head("bias", *bias);
    LIGER_CHECK(
        bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, "bias",
        c10::str("have shape [", weight.sym_size(0), "], one value per class"), bias->sym_sizes());
  }
  check_integers(op, "target", target);
  check_same_device(op, "target", target, "input", input);
  const int64_t token_dims = input.dim() - 1;
  sequence_dim = check_sequence_dim(op, "input", input, sequence_dim, vocabulary);
  std::vector<c10::SymInt> tokens = input.sym_sizes().slice(0, token_dims).vec();
  const bool fits = target.dim() == token_dims || target.dim() == token_dims + 1;
  // Along sequence_dim only the ranks together know the size.
  if (sequence_dim && fits) tokens[*sequence_dim] = target.sym_size(*sequence_dim);
  LIGER_CHECK(
      fits && target.sym_sizes().slice(0, token_dims).equals(tokens), op, "target",
      c10::str("have shape ", c10::SymIntArrayRef(tokens), ", or that with one dimension more"), target.sym_sizes(),
      core::hint_if_swapped("input", input, "weight", weight, target));
  auto positive = [](double value) { return value > 0 && std::isfinite(value); };
  LIGER_CHECK(std::isfinite(logits_scale), op, "logits_scale", "be finite", logits_scale);
  LIGER_CHECK(!softcap || positive(*softcap), op, "softcap", "be positive and finite", *softcap);
  LIGER_CHECK(positive(temperature), op, "temperature", "be positive and finite", temperature);
  LIGER_CHECK(
      !memory_budget || *memory_budget > 0, op, "memory_budget", "be a positive number of bytes", *memory_budget);
  const Tensor t = value_or_undefined(low_rank_input), b = value_or_undefined(low_rank_weight);
  check_low_rank(op, "", input, weight, t, b, sequence_dim);
  return {
      logits_scale,
      {temperature, ignore_index, softcap},
      entropy,
      entropy_grad,
      mean_logits,
      log_sum_sq_probs,
      is_top1,
      memory_budget,
      vocabulary,
      sequence_dim,
      t,
      b};
}

/// wanted: what backward will need. Nothing: only the results.
Forward empty_forward(const Tensor& input, const Tensor& target, const Settings& s, Wanted wanted) {
  const auto numbers = input.options().dtype(compute_type(input));
  const auto tokens = target.sym_sizes().slice(0, input.dim() - 1);
  auto if_wanted = [&](bool is, c10::SymIntArrayRef sizes, at::TensorOptions options) {
    return is ? at::empty_symint(sizes, options) : at::empty({0}, options);
  };
  Forward out;
  out.rows.log_probs = at::empty_symint(target.sym_sizes(), numbers);
  out.rows.entropy = if_wanted(s.entropy, tokens, numbers);
  out.rows.mean_logits = if_wanted(s.mean_logits, tokens, numbers);
  out.rows.log_sum_sq_probs = if_wanted(s.log_sum_sq_probs, tokens, numbers);
  out.rows.is_top1 = if_wanted(s.is_top1, target.sym_sizes(), numbers.dtype(at::kBool));
  if (!wanted.any()) return out;
  c10::SymDimVector three(tokens.begin(), tokens.end());
  three.push_back(3);
  out.rows.stats = at::empty_symint(three, numbers);
  out.rows.chosen = at::empty_symint(target.sym_sizes(), numbers);
  if (!wanted.head() && !s.sequence_dim) {
    c10::SymIntArrayRef sizes = input.sym_sizes();
    out.of_log_probs = at::empty_symint(sizes, input.options());
    if (s.entropy && s.entropy_grad) out.of_entropy = at::empty_symint(sizes, input.options());
  }
  return out;
}

/// input, weight, target, bias, stats, chosen, of_log_probs, of_entropy, low_rank_input, low_rank_weight
struct Node : core::BackwardNode<Node, 10> {
  Settings s{};
  int64_t wanted = 0;

  auto state() { return std::tuple_cat(s.tie(), std::tie(wanted)); }

  std::string name() const override { return kOp; }
  core::variable_list backward(core::variable_list&& grads) override;
};

using Results5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// O: the types of the options in the schemas.
template <class... O>
struct Ops {
  using Cpu = fused_linear_log_probs::Cpu;
  using Cuda = fused_linear_log_probs::Cuda;
  using Meta = fused_linear_log_probs::Meta;
  // Casts the arguments that F.linear casts. Results are fp32 in any case.
  using Autocast = core::AutocastLinear<0, 1, 3>;

  template <class>
  static constexpr const char* name() {
    return kOp;
  }
  template <class>
  static constexpr const char* schema() {
    return schemas::fused_linear_log_probs;
  }

  using Everything = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

  template <class On>
  static Forward run_wanted(
      Wanted wanted, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
      O... options) {
    Settings s = check(kOp, input, weight, target, bias, options...);
    Forward out = empty_forward(input, target, s, wanted);
    if constexpr (On::device != nullptr) {
      forward(kOp, *On::device, input, weight, target, value_or_undefined(bias), s, out);
    }
    return out;
  }

  static Results5 results(const Forward& out) {
    const log_probs::Results& rows = out.rows;
    return {rows.log_probs, rows.entropy, rows.mean_logits, rows.log_sum_sq_probs, rows.is_top1};
  }

  template <class On, class>
  static Results5 run(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias, O... options) {
    return results(run_wanted<On>({}, input, weight, target, bias, options...));
  }

  template <class On>
  static Everything fwd(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias, O... options,
      int64_t wanted) {
    Forward out = run_wanted<On>(Wanted::from_bits(wanted), input, weight, target, bias, options...);
    return std::tuple_cat(
        results(out), std::make_tuple(out.rows.stats, out.rows.chosen, out.of_log_probs, out.of_entropy));
  }

  static constexpr const char* kBackward = "fused_linear_log_probs backward";

  static void check_upstream(
      const OptionalTensor& grad, const OptionalTensor& grad_entropy, const Tensor& target, int64_t token_dims) {
    auto check_one = [&](const char* name, const OptionalTensor& g, c10::SymIntArrayRef sizes) {
      if (!g || !g->defined()) return;
      check_same_device(kBackward, name, *g, "target", target);
      LIGER_CHECK(g->sym_sizes().equals(sizes), kBackward, name, c10::str("have shape ", sizes), g->sym_sizes());
    };
    check_one("the log-probabilities' gradient", grad, target.sym_sizes());
    check_one("the entropy's gradient", grad_entropy, target.sym_sizes().slice(0, token_dims));
  }

  template <class On>
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(
      const OptionalTensor& grad, const OptionalTensor& grad_entropy, const Tensor& input, const Tensor& weight,
      const Tensor& target, const OptionalTensor& bias, const Tensor& stats, const Tensor& chosen, O... options,
      int64_t wanted) {
    Settings s = check(kBackward, input, weight, target, bias, options...);
    check_upstream(grad, grad_entropy, target, input.dim() - 1);
    const Wanted w = Wanted::from_bits(wanted);
    const Tensor b = value_or_undefined(bias);
    Gradients out = empty_gradients(input, weight, b, w, s.low_rank_input, s.low_rank_weight);
    if constexpr (On::device != nullptr) {
      backward(
          kBackward, *On::device, value_or_undefined(grad), value_or_undefined(grad_entropy), input, weight, target, b,
          stats, chosen, s, out);
    }
    return {out.input, out.weight, out.bias, out.low_rank_input, out.low_rank_weight};
  }

  /// d input of a frozen head. It may overwrite of_log_probs.
  template <class On>
  static void scale_into(
      Tensor& out, const OptionalTensor& grad, const OptionalTensor& grad_entropy, const Tensor& of_log_probs,
      const OptionalTensor& of_entropy, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& stats,
      const OptionalTensor& chosen, double logits_scale, std::optional<double> softcap, double temperature,
      int64_t ignore_index, c10::string_view group, int64_t classes, ClassSizes sizes) {
    check_upstream(grad, grad_entropy, target, of_log_probs.dim() - 1);
    Settings s{};
    s.logits_scale = logits_scale;
    s.o = {temperature, ignore_index, softcap};
    s.vocabulary = cross_entropy::parse_vocabulary(kBackward, group, classes, sizes);
    if constexpr (On::device != nullptr) {
      scale_rows(
          kBackward, value_or_undefined(grad), value_or_undefined(grad_entropy), of_log_probs,
          value_or_undefined(of_entropy), target, value_or_undefined(weight), value_or_undefined(stats),
          value_or_undefined(chosen), s, out);
    }
  }
  template <class On>
  static Tensor scaled(
      const OptionalTensor& grad, const OptionalTensor& grad_entropy, const Tensor& of_log_probs,
      const OptionalTensor& of_entropy, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& stats,
      const OptionalTensor& chosen, double logits_scale, std::optional<double> softcap, double temperature,
      int64_t ignore_index, c10::string_view group, int64_t classes, ClassSizes sizes) {
    Tensor out = at::empty_like(of_log_probs);
    scale_into<On>(
        out, grad, grad_entropy, of_log_probs, of_entropy, target, weight, stats, chosen, logits_scale, softcap,
        temperature, ignore_index, group, classes, sizes);
    return out;
  }
  template <class On>
  static void scaled_(
      const OptionalTensor& grad, const OptionalTensor& grad_entropy, Tensor& of_log_probs,
      const OptionalTensor& of_entropy, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& stats,
      const OptionalTensor& chosen, double logits_scale, std::optional<double> softcap, double temperature,
      int64_t ignore_index, c10::string_view group, int64_t classes, ClassSizes sizes) {
    scale_into<On>(
        of_log_probs, grad, grad_entropy, of_log_probs, of_entropy, target, weight, stats, chosen, logits_scale,
        softcap, temperature, ignore_index, group, classes, sizes);
  }

  template <class On>
  static void implement(torch::Library& m) {
    core::implement<fwd<On>>(m, "_fused_linear_log_probs_fwd");
    core::implement<bwd<On>>(m, "_fused_linear_log_probs_bwd");
    core::implement<scaled<On>>(m, "_fused_linear_log_probs_scale");
    core::implement<scaled_<On>>(m, "_fused_linear_log_probs_scale_");
  }

  // ---- Autograd

  template <class>
  static std::optional<Results5> with_graph(
      const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias, O... options) {
    core::check_dense(kOp, "input", input);
    core::check_dense(kOp, "weight", weight);
    core::check_dense(kOp, "target", target);
    Settings s = check(kOp, input, weight, target, bias, options...);
    core::check_no_forward_ad(kOp, input, weight, bias, s.low_rank_input, s.low_rank_weight);
    Wanted wanted;
    wanted.input = torch::autograd::compute_requires_grad(input);
    wanted.weight = torch::autograd::compute_requires_grad(weight);
    wanted.bias = torch::autograd::compute_requires_grad(bias);
    wanted.low_rank_input = torch::autograd::compute_requires_grad(s.low_rank_input);
    wanted.low_rank_weight = torch::autograd::compute_requires_grad(s.low_rank_weight);
    if (!wanted.any()) return std::nullopt;
    static const auto fwd_op = core::find_op<decltype(fwd<Meta>)>("_fused_linear_log_probs_fwd");
    Forward out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(
          out.rows.log_probs, out.rows.entropy, out.rows.mean_logits, out.rows.log_sum_sq_probs, out.rows.is_top1,
          out.rows.stats, out.rows.chosen, out.of_log_probs, out.of_entropy) =
          fwd_op.call(input, weight, target, bias, options..., wanted.bits());
    }
    auto node = core::make_node<Node>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias, s.low_rank_input, s.low_rank_weight));
    // Saved only if backward reads it.
    const bool scales = out.of_log_probs.defined(), recomputes = !scales || (s.entropy && !s.entropy_grad);
    const bool adds_ids = has_several_ids(input, target);
    auto save = [](const auto& t, bool used = true) {
      return used ? core::SavedVariable(t, false) : core::SavedVariable(Tensor(), false);
    };
    node->saved = {
        save(input, recomputes),
        save(weight, recomputes || adds_ids),
        save(target),
        save(bias, recomputes),
        save(out.rows.stats, recomputes || adds_ids),
        save(out.rows.chosen, recomputes || adds_ids),
        save(out.of_log_probs),
        save(out.of_entropy),
        save(s.low_rank_input, recomputes),
        save(s.low_rank_weight, recomputes)};
    node->s = s;
    node->s.low_rank_input = node->s.low_rank_weight = Tensor();
    node->wanted = wanted.bits();
    torch::autograd::set_history(out.rows.log_probs, node);
    if (s.entropy) torch::autograd::set_history(out.rows.entropy, node);
    return results(out);
  }

  using Form = ops::Form<Ops, Results5, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, O...>;
};

using Linear =
    Ops<double, std::optional<double>, double, int64_t, bool, bool, bool, bool, bool, std::optional<int64_t>,
        c10::string_view, int64_t, ClassSizes, std::optional<int64_t>, const OptionalTensor&, const OptionalTensor&>;

core::variable_list Node::backward(core::variable_list&& grads) {
  const Tensor grad = std::move(grads[0]), grad_entropy = grads.size() > 1 ? std::move(grads[1]) : Tensor();
  if (!grad.defined() && !grad_entropy.defined()) return core::variable_list(5);
  Tensor input = take(0), weight = take(1), target = take(2), bias = take(3), stats = take(4), chosen = take(5);
  Tensor of_log_probs = take(6), of_entropy = take(7);
  OptionalTensor low_rank_input = take(8), low_rank_weight = take(9);
  const Vocabulary& v = s.vocabulary;
  if (of_log_probs.defined() && (!grad_entropy.defined() || of_entropy.defined())) {
    auto run = [&](const auto& op) {
      return op.call(
          grad, grad_entropy, of_log_probs, of_entropy, target, weight, stats, chosen, s.logits_scale, s.o.softcap,
          s.o.temperature, s.o.ignore_index, v.group, v.classes, v.class_sizes());
    };
    if (may_overwrite(of_log_probs, of_log_probs)) {
      static const auto op = core::find_op<decltype(Linear::scaled_<Meta>)>("_fused_linear_log_probs_scale_");
      run(op);
      return {of_log_probs.detach(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
    static const auto op = core::find_op<decltype(Linear::scaled<Meta>)>("_fused_linear_log_probs_scale");
    return {run(op), Tensor(), Tensor(), Tensor(), Tensor()};
  }
  static const auto op = core::find_op<decltype(Linear::bwd<Meta>)>("_fused_linear_log_probs_bwd");
  auto [dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight] = op.call(
      grad, grad_entropy, input, weight, target, bias, stats, chosen, s.logits_scale, s.o.softcap, s.o.temperature,
      s.o.ignore_index, s.entropy, s.entropy_grad, s.mean_logits, s.log_sum_sq_probs, s.is_top1, s.memory_budget,
      v.group, v.classes, v.class_sizes(), s.sequence_dim, low_rank_input, low_rank_weight, wanted);
  return {dinput, dweight, dbias, dlow_rank_input, dlow_rank_weight};
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  const std::string tensors = "Tensor input, Tensor weight, Tensor target, ";
  const std::string softmax = "float logits_scale, float? softcap, float temperature, int ignore_index, ";
  const std::string classes = "str group, int classes, int[]? class_sizes";
  const std::string options = softmax +
      "bool entropy, bool entropy_grad, bool mean_logits, bool log_sum_sq_probs, bool is_top1, int? memory_budget, " +
      classes + ", int? sequence_dim, Tensor? low_rank_input, Tensor? low_rank_weight, int wanted) -> ";
  const std::string scale = "Tensor? of_entropy, Tensor target, Tensor? weight, Tensor? stats, Tensor? chosen, " +
      softmax + classes + ") -> ";
  core::define(
      m,
      "_fused_linear_log_probs_fwd(" + tensors + "Tensor? bias, " + options +
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_log_probs_bwd(Tensor? grad, Tensor? grad_entropy, " + tensors +
          "Tensor? bias, Tensor stats, Tensor chosen, " + options + "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m, "_fused_linear_log_probs_scale(Tensor? grad, Tensor? grad_entropy, Tensor of_log_probs, " + scale + "Tensor");
  core::define(
      m, "_fused_linear_log_probs_scale_(Tensor? grad, Tensor? grad_entropy, Tensor(a!) of_log_probs, " + scale + "()");
}

LIGER_LIBRARY_IMPL(CPU, m) { Linear::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { Linear::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { Linear::implement<Meta>(m); }

LIGER_OPERATOR(Linear::Form)

}  // namespace liger::ops::fused_linear_log_probs
