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

#include <ATen/MemoryOverlap.h>

#include "core/operator.h"
#include "ops/losses/cross_entropy.h"

namespace liger::ops::cross_entropy {
namespace {

struct Meta {
  static void forward(auto&&...) {}
  static void backward(auto&&...) {}
  static void forward_backward(auto&&...) {}
  static void scale(auto&&...) {}
  static void totals(auto&&...) {}
};

constexpr const char* name_of(bool metrics) { return metrics ? "cross_entropy_with_metrics" : "cross_entropy"; }

using Metrics = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using AllResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The divisors of a mean.
struct Totals : core::Private<Totals, Tensor(const Tensor&, const OptionalTensor&, int64_t, int64_t, at::ScalarType)> {
  static constexpr const char* kName = "_cross_entropy_totals";
  static constexpr const char* kArguments = "target, weight, classes, ignore_index, dtype";

  template <class Device>
  static Tensor run(
      const Tensor& target, const OptionalTensor& weight, int64_t classes, int64_t ignore_index, at::ScalarType dtype) {
    const Options o{Reduction::Mean, ignore_index, 0, 0, {}, {}};
    const Tensor out = at::empty({2}, target.options().dtype(dtype));
    Device::totals(out, target, value_or_undefined(weight), o, classes);
    return out;
  }
};

/// O: the types of the options in the schemas.
template <class... O>
struct Ops {
  template <class Device>
  static AllResults forward(
      Wanted wanted, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
      const OptionalTensor& totals, O... options) {
    const char* op = name_of(wanted.metrics);
    const Options o = check(op, logits, target, weight, options...);
    const Results out = empty_results(logits, target, o, wanted);
    Device::forward(op, logits, target, value_or_undefined(weight), value_or_undefined(totals), o, out);
    return {out.loss, out.z_loss, out.accuracy, out.predicted, out.stats, out.totals};
  }

  /// totals: the divisors of a mean, if they are not those of `target`.
  struct Forward
      : core::Private<
            Forward,
            AllResults(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, bool, O...)> {
    static constexpr const char *kName = "_cross_entropy_fwd", *kPublic = schemas::cross_entropy,
                                *kArguments = "logits...weight, totals, metrics, reduction...";

    template <class Device>
    static AllResults run(
        const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const OptionalTensor& totals,
        bool metrics, O... options) {
      return forward<Device>({metrics, true}, logits, target, weight, totals, options...);
    }
  };

  struct Backward : core::Private<
                        Backward,
                        Tensor(
                            const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                            const OptionalTensor&, O...),
                        core::Overwrites<1>> {
    static constexpr const char *kName = "_cross_entropy_bwd", *kPublic = schemas::cross_entropy,
                                *kArguments = "grad, logits...weight, stats, totals, reduction...";

    template <class Device>
    static Tensor run(
        const std::array<Tensor, 1>& into, const Tensor& grad, const Tensor& logits, const Tensor& target,
        const OptionalTensor& weight, const Tensor& stats, const OptionalTensor& totals, O... options) {
      const char* op = name_of(false);
      const Options o = check(op, logits, target, weight, options...);
      Tensor dlogits = core::result_rows(into[0], true, logits);
      const Tensor w = value_or_undefined(weight), divisors = value_or_undefined(totals);
      Device::backward(op, dlogits, logits, target, w, stats.contiguous(), divisors, grad, o);
      return dlogits;
    }
  };

  template <class R>
  struct Form;

  struct GradientNode : core::BackwardNode<GradientNode, 5> {  // logits, target, weight, stats, totals
    typename Form<Tensor>::Options options;

    auto state() { return std::tie(options); }
    std::string name() const override { return name_of(false); }

    void record(
        const AllResults& out, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const O&...) {
      this->save(logits, target, weight, std::get<4>(out), std::get<5>(out));
      this->connect(std::get<0>(out));
    }

    core::variable_list backward(core::variable_list&& grads) override {
      Tensor grad = std::move(grads[0]);
      if (!grad.defined()) return {Tensor()};
      Tensor logits = this->take(0), target = this->take(1), weight = this->take(2);
      Tensor stats = this->take(3), totals = this->take(4);
      return {core::with_options(options, [&](const auto&... o) {
        return Backward::call(this->may_overwrite(logits, logits), grad, logits, target, weight, stats, totals, o...);
      })};
    }
  };

  // No autocast: under autocast, PyTorch computes this loss in float32. This operator does that for logits of any
  // dtype, without a copy.
  template <class R>
  struct Form : core::Operator<Form<R>, R(const Tensor&, const Tensor&, const OptionalTensor&, O...)> {
    static constexpr bool kMetrics = std::is_same_v<R, Metrics>;
    static constexpr const char *kOp = name_of(kMetrics),
                                *kSchema = kMetrics ? schemas::cross_entropy_with_metrics : schemas::cross_entropy;
    using Edges = core::Positions<0>;
    using Constants = core::Positions<2>;
    using Node = GradientNode;
    using Cpu = cross_entropy::Cpu;
    using Cuda = cross_entropy::Cuda;
    using Meta = cross_entropy::Meta;

    template <class Device>
    static R run(bool, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
      return core::leading<R>(forward<Device>({kMetrics, false}, logits, target, weight, {}, options...));
    }

    static AllResults run_forward(
        const Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
      at::AutoDispatchBelowADInplaceOrView below;
      return Forward::call(logits, target, weight, {}, kMetrics, options...);
    }
  };
};

using CrossEntropy =
    Ops<c10::string_view, int64_t, double, double, std::optional<double>, c10::string_view, int64_t, ClassSizes>;

struct InPlaceNode : core::BackwardNode<InPlaceNode, 1> {  // d loss / d logits
  std::string name() const override { return "cross_entropy_"; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor()};
    Tensor dlogits = take(0);
    return {Scale::call(core::is_plain(dlogits) && !keeps_graph(), dlogits, grad, name())};
  }
};

/// O: the types of the options in the schema.
template <class... O>
struct InPlace : core::Operator<InPlace<O...>, Tensor(Tensor&, const Tensor&, const OptionalTensor&, O...)> {
  static constexpr const char *kOp = "cross_entropy_", *kSchema = schemas::cross_entropy_;
  // Of all operators of this file.
  using Privates = core::Privates<CrossEntropy::Forward, CrossEntropy::Backward, Scale, Totals>;
  using Edges = core::Positions<0>;
  using Constants = core::Positions<2>;
  using Cpu = cross_entropy::Cpu;
  using Cuda = cross_entropy::Cuda;
  using Meta = cross_entropy::Meta;

  template <class Device>
  static Tensor run(bool, Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    const cross_entropy::Options o = check(kOp, logits, target, weight, options...);
    LIGER_CHECK(
        at::has_internal_overlap(logits) != at::MemOverlap::Yes, kOp, "logits", "not overlap themselves", "strides ",
        logits.strides());
    const Results out = empty_results(logits, target, o, {});
    Device::forward_backward(kOp, logits, target, value_or_undefined(weight), o, out);
    return out.loss;
  }

  // Inference mode skips autograd, but graphs that saved the logits earlier must still see a new version.
  static Tensor versioned(Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    Tensor loss;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      loss = InPlace::handle().call(logits, target, weight, options...);
    }
    torch::autograd::increment_version(logits);
    return loss;
  }

  static Tensor autograd(Tensor& logits, const Tensor& target, const OptionalTensor& weight, O... options) {
    InPlace::check_tensors(logits, target, weight, options...);
    bool differentiable = torch::autograd::compute_requires_grad(logits);
    torch::autograd::check_inplace(logits, differentiable);
    auto edges = differentiable ? torch::autograd::collect_next_edges(logits) : torch::autograd::edge_list();
    Tensor loss = versioned(logits, target, weight, options...);
    if (!differentiable) return loss;
    auto node = core::make_node<InPlaceNode>();
    node->set_next_edges(torch::autograd::edge_list(edges));
    node->save(logits.detach());
    node->connect(loss);
    auto refuse = core::make_node<torch::autograd::Error>(
        "cross_entropy_: the logits hold their gradient now, so they cannot be differentiated", std::move(edges));
    torch::autograd::rebase_history(logits, refuse);
    return loss;
  }

  static void implement_autograd(torch::Library& m) { m.impl(kOp, autograd); }
};

using CrossEntropyInPlace = InPlace<c10::string_view, int64_t, double, double, std::optional<double>>;

}  // namespace

LIGER_OPERATOR(CrossEntropy::Form<Tensor>)
LIGER_OPERATOR(CrossEntropy::Form<Metrics>)
LIGER_OPERATOR(CrossEntropyInPlace)
LIGER_LIBRARY_IMPL(ADInplaceOrView, m) { m.impl(CrossEntropyInPlace::kOp, CrossEntropyInPlace::versioned); }

}  // namespace liger::ops::cross_entropy
