// cross_entropy(logits, target, ...): torch.nn.functional.cross_entropy against class indices, over the last dimension.
// In addition, softcap replaces the logits by softcap * tanh(logits / softcap), and lse_square_scale adds the z-loss
// lse_square_scale * logsumexp^2.
//
// logits: (..., V) of any strides, target: (...) int64 or int32, weight: (V,) in fp32 or the logits' dtype.
// Losses and statistics are fp32 (fp64 for fp64 logits). A mean divides by the sum of the targets' weights. Its z-loss
// has no weights and is divided by the number of targets. On CUDA, a target out of range makes its row's loss and
// gradient NaN.
//
// cross_entropy               saves three numbers per row; backward overwrites the logits if nothing else can see them
// cross_entropy_with_metrics  (loss, z_loss, token_accuracy, predicted_tokens); only the loss has a gradient
// cross_entropy_              overwrites the logits with d loss / d logits
//
// With `group`, the name of a process group, its ranks have the logits of different classes, and `classes` is the
// number of all. Losses and metrics are the same on all ranks.

#include "ops/losses/cross_entropy.h"
#include "ops/losses/forms.h"

namespace liger::ops::cross_entropy {
namespace {

using core::value_or_undefined;

// ---- The dispatched ops

struct Cpu {
  static constexpr auto forward = forward_cpu;
  static constexpr auto backward = backward_cpu;
  static constexpr auto forward_backward = forward_backward_cpu;
  static constexpr auto scale = scale_cpu;
  static constexpr auto totals = totals_cpu;
};

struct Cuda {
  static constexpr auto forward = forward_cuda;
  static constexpr auto backward = backward_cuda;
  static constexpr auto forward_backward = forward_backward_cuda;
  static constexpr auto scale = scale_cuda;
  static constexpr auto totals = totals_cuda;
};

struct Meta {
  static Results forward(
      const char*, Tensor logits, const Tensor& target, const Tensor&, const Tensor&, const Options& o, Wanted wanted) {
    return empty_results(logits, target, o, wanted);
  }
  static void backward(
      const char*, Tensor&, Tensor, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Options&) {}
  static Results forward_backward(const char*, Tensor& logits, const Tensor& target, const Tensor&, const Options& o) {
    return empty_results(logits, target, o, {});
  }
  static void scale(const char*, Tensor&, const Tensor&) {}
  static Tensor totals(const Tensor& target, const Tensor&, const Options&, int64_t, at::ScalarType dtype) {
    return at::empty({2}, target.options().dtype(dtype));
  }
};

constexpr const char* name_of(bool metrics) { return metrics ? "cross_entropy_with_metrics" : "cross_entropy"; }

struct BackwardNode : core::BackwardNode<BackwardNode, 5> {  // logits, target, weight, stats, totals
  Options o;

  auto state() { return o.tie(); }

  std::string name() const override { return name_of(false); }
  core::variable_list backward(core::variable_list&& grads) override;
};

struct InplaceBackwardNode : core::BackwardNode<InplaceBackwardNode, 1> {  // d loss / d logits
  std::string name() const override { return "cross_entropy_"; }
  core::variable_list backward(core::variable_list&& grads) override;
};

using Metrics = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_differentiable(const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight) {
  core::check_dense(op, "logits", logits);
  core::check_dense(op, "target", target);
  core::check_dense(op, "weight", weight);
  core::check_no_forward_ad(op, logits, weight);
  bool learned = torch::autograd::compute_requires_grad(weight);
  LIGER_CHECK(!learned, op, "weight", "not require a gradient", "one that does");
}

/// O: the types of the options in the schemas.
template <class... O>
struct Ops {
  using Cpu = cross_entropy::Cpu;
  using Cuda = cross_entropy::Cuda;
  using Meta = cross_entropy::Meta;
  // Under autocast, PyTorch computes this loss in float32. This operator does that for logits of any dtype, without a
  // copy.
  using Autocast = core::NoAutocast;

  template <class R>
  static constexpr bool has_metrics = std::is_same_v<R, Metrics>;

  template <class R>
  static constexpr const char* name() {
    return name_of(has_metrics<R>);
  }
  template <class R>
  static constexpr const char* schema() {
    return has_metrics<R> ? schemas::cross_entropy_with_metrics : schemas::cross_entropy;
  }

  template <class R>
  static R results(const Results& out) {
    if constexpr (has_metrics<R>) {
      return {out.loss, out.z_loss, out.accuracy, out.predicted};
    } else {
      return out.loss;
    }
  }

  template <class Device, class R>
  static R run(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    const char* op = name<R>();
    const Options o = check(op, logits, target, weight, options...);
    return results<R>(Device::forward(op, logits, target, value_or_undefined(weight), {}, o, {has_metrics<R>, false}));
  }

  /// divisors: of a mean, if they are not those of `target`.
  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fwd(
      const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& divisors,
      bool metrics, O... options) {
    const char* op = name_of(metrics);
    Options o = check(op, logits, target, weight, options...);
    Results out = Device::forward(
        op, logits, target, value_or_undefined(weight), value_or_undefined(divisors), o, {metrics, true});
    return {out.loss, out.z_loss, out.accuracy, out.predicted, out.stats, out.totals};
  }

  template <class Device>
  static Tensor bwd(
      const Tensor& grad, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Tensor& stats,
      const OptionalTensor& totals, O... options) {
    const char* op = name_of(false);
    Options o = check(op, logits, target, weight, options...);
    Tensor dlogits = core::empty_rows_like(logits);
    Device::backward(
        op, dlogits, logits, target, value_or_undefined(weight), stats, value_or_undefined(totals), grad, o);
    return dlogits;
  }

  template <class Device>
  static void bwd_(
      const Tensor& grad, Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Tensor& stats,
      const OptionalTensor& totals, O... options) {
    const char* op = name_of(false);
    Options o = check(op, logits, target, weight, options...);
    Device::backward(
        op, logits, logits, target, value_or_undefined(weight), stats, value_or_undefined(totals), grad, o);
  }

  /// op: the operator's name in messages.
  template <class Device>
  static void scale_(Tensor& dlogits, const Tensor& grad, c10::string_view op) {
    Device::scale(std::string(op).c_str(), dlogits, grad);
  }

  template <class Device>
  static Tensor scale(const Tensor& dlogits, const Tensor& grad, c10::string_view op) {
    Tensor out = dlogits.clone();
    Device::scale(std::string(op).c_str(), out, grad);
    return out;
  }

  template <class Device>
  static Tensor totals(
      const Tensor& target, const OptionalTensor& weight, int64_t classes, int64_t ignore_index, at::ScalarType dtype) {
    return Device::totals(
        target, value_or_undefined(weight), {Reduction::Mean, ignore_index, 0, 0, {}, {}}, classes, dtype);
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<fwd<Device>>(m, "_cross_entropy_fwd");
    core::implement<bwd<Device>>(m, "_cross_entropy_bwd");
    core::implement<bwd_<Device>>(m, "_cross_entropy_bwd_");
    core::implement<scale<Device>>(m, "_cross_entropy_scale");
    core::implement<scale_<Device>>(m, "_cross_entropy_scale_");
    core::implement<totals<Device>>(m, "_cross_entropy_totals");
  }

  // ---- Autograd

  template <class R>
  static std::optional<R> with_graph(
      const Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    check_differentiable(name<R>(), logits, target, weight);
    if (!torch::autograd::compute_requires_grad(logits)) return std::nullopt;
    static const auto op = core::find_op<decltype(fwd<Cpu>)>("_cross_entropy_fwd");
    Results out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(out.loss, out.z_loss, out.accuracy, out.predicted, out.stats, out.totals) =
          op.call(logits, target, weight, {}, has_metrics<R>, options...);
    }
    auto node = core::make_node<BackwardNode>();
    node->o = parse(name<R>(), options...);
    node->set_next_edges(torch::autograd::collect_next_edges(logits));
    node->saved = {
        core::SavedVariable(logits, false), core::SavedVariable(target, false), core::SavedVariable(weight, false),
        core::SavedVariable(out.stats, false), core::SavedVariable(out.totals, false)};
    torch::autograd::set_history(out.loss, node);
    return results<R>(out);
  }

  template <class R>
  using Form = ops::Form<Ops, R, const Tensor&, const Tensor&, const OptionalTensor&, O...>;
};

using CrossEntropy =
    Ops<c10::string_view, int64_t, double, double, std::optional<double>, c10::string_view, int64_t, ClassSizes>;

/// O: the types of the options in the schema.
template <class... O>
struct InPlace {
  template <class Device>
  static Tensor run(Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    const char* op = "cross_entropy_";
    Options o = check(op, logits, target, weight, options...);
    check_no_overlap(op, logits);
    return Device::forward_backward(op, logits, target, value_or_undefined(weight), o).loss;
  }

  // Inference mode skips autograd, but graphs that saved the logits earlier must still see a new version.
  static Tensor versioned(Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    static const auto op = core::find_op<decltype(run<Cpu>)>("cross_entropy_");
    Tensor loss;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      loss = op.call(logits, target, weight, options...);
    }
    torch::autograd::increment_version(logits);
    return loss;
  }

  static Tensor autograd(Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    check_differentiable("cross_entropy_", logits, target, weight);
    bool differentiable = torch::autograd::compute_requires_grad(logits);
    torch::autograd::check_inplace(logits, differentiable);
    auto edges = differentiable ? torch::autograd::collect_next_edges(logits) : torch::autograd::edge_list();
    Tensor loss = versioned(logits, target, weight, options...);
    if (!differentiable) return loss;
    auto node = core::make_node<InplaceBackwardNode>();
    node->set_next_edges(torch::autograd::edge_list(edges));
    node->saved = {core::SavedVariable(logits.detach(), false)};
    torch::autograd::set_history(loss, node);
    auto refuse = core::make_node<torch::autograd::Error>(
        "cross_entropy_: the logits hold their gradient now, so they cannot be differentiated", std::move(edges));
    torch::autograd::rebase_history(logits, refuse);
    return loss;
  }
};

using CrossEntropyInPlace = InPlace<c10::string_view, int64_t, double, double, std::optional<double>>;

core::variable_list BackwardNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return {Tensor()};
  Tensor logits = take(0), target = take(1), weight = take(2), stats = take(3), totals = take(4);
  const Vocabulary& v = o.vocabulary;
  if (may_overwrite(logits, logits)) {
    static const auto op = core::find_op<decltype(CrossEntropy::bwd_<Cpu>)>("_cross_entropy_bwd_");
    op.call(
        grad, logits, target, weight, stats, totals, o.reduction_name(), o.ignore_index, o.label_smoothing,
        o.lse_square_scale, o.softcap, v.group, v.classes, v.class_sizes());
    return {logits.detach()};
  }
  static const auto op = core::find_op<decltype(CrossEntropy::bwd<Cpu>)>("_cross_entropy_bwd");
  return {op.call(
      grad, logits, target, weight, stats, totals, o.reduction_name(), o.ignore_index, o.label_smoothing,
      o.lse_square_scale, o.softcap, v.group, v.classes, v.class_sizes())};
}

core::variable_list InplaceBackwardNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return {Tensor()};
  Tensor dlogits = take(0);
  if (core::is_plain(dlogits) && !keeps_graph()) {
    static const auto op = core::find_op<decltype(CrossEntropy::scale_<Cpu>)>("_cross_entropy_scale_");
    op.call(dlogits, grad, name());
    return {dlogits.detach()};
  }
  static const auto op = core::find_op<decltype(CrossEntropy::scale<Cpu>)>("_cross_entropy_scale");
  return {op.call(dlogits, grad, name())};
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  const std::string private_tail =
      "str reduction, int ignore_index, float label_smoothing, float lse_square_scale, float? softcap, str group, "
      "int classes, int[]? class_sizes) -> ";
  const std::string saved = "Tensor target, Tensor? weight, Tensor stats, Tensor? totals, ";
  core::define(m, schemas::cross_entropy_);
  core::define(
      m,
      "_cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, Tensor? totals, bool metrics, " + private_tail +
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(m, "_cross_entropy_bwd(Tensor grad, Tensor logits, " + saved + private_tail + "Tensor");
  core::define(m, "_cross_entropy_bwd_(Tensor grad, Tensor(a!) logits, " + saved + private_tail + "()");
  core::define(
      m,
      "_cross_entropy_totals(Tensor target, Tensor? weight, int classes, int ignore_index, ScalarType dtype) -> "
      "Tensor");
  core::define(m, "_cross_entropy_scale(Tensor dlogits, Tensor grad, str op) -> Tensor");
  core::define(m, "_cross_entropy_scale_(Tensor(a!) dlogits, Tensor grad, str op) -> ()");
}

template <class Device>
void implement(torch::Library& m) {
  CrossEntropy::implement<Device>(m);
  core::implement<CrossEntropyInPlace::run<Device>>(m, "cross_entropy_");
}

LIGER_LIBRARY_IMPL(CPU, m) { implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { implement<Meta>(m); }

LIGER_LIBRARY_IMPL(Autograd, m) { m.impl("cross_entropy_", CrossEntropyInPlace::autograd); }
LIGER_LIBRARY_IMPL(ADInplaceOrView, m) { m.impl("cross_entropy_", CrossEntropyInPlace::versioned); }

LIGER_OPERATOR(CrossEntropy::Form<Tensor>)
LIGER_OPERATOR(CrossEntropy::Form<Metrics>)

}  // namespace liger::ops::cross_entropy
