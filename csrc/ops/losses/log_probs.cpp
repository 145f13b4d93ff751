// log_probs(logits, index, ...): per row of logits, the log-probability of one id or of K ids under
// softmax(softcap(logits) / temperature), and its entropy. Both are differentiable.
//
// Saves the logits, three numbers per row and one per id. Backward overwrites the logits if nothing else can see them.
// A row whose ids are all ignore_index has results and gradients of 0. On CUDA, an id out of range makes its
// log-probability and its row's gradient NaN.

#include "core/operator.h"
#include "ops/losses/log_probs.h"

namespace liger::ops::log_probs {
namespace {

constexpr const char* kOp = "log_probs";
constexpr const char* kBackward = "log_probs backward";

template <ForwardOn* kForward, BackwardOn* kBackward>
struct On {
  static constexpr auto forward = kForward;
  static constexpr auto backward = kBackward;
};
using Cpu = On<forward_cpu, backward_cpu>;
using Cuda = On<forward_cuda, backward_cuda>;

struct Meta {
  static void forward(auto&&...) {}
  static void backward(auto&&...) {}
};

Options check(
    const char* op, const Tensor& logits, const Tensor& index, double temperature, int64_t ignore_index,
    std::optional<double> softcap) {
  check_rows(op, "logits", logits);
  check_integers(op, "index", index);
  check_same_device(op, "index", index, "logits", logits);
  const auto rows = logits.sym_sizes().slice(0, logits.dim() - 1);
  LIGER_CHECK(
      (index.dim() == logits.dim() - 1 || index.dim() == logits.dim()) &&
          index.sym_sizes().slice(0, rows.size()).equals(rows),
      op, "index", c10::str("have shape ", rows, ", or that with one dimension more"), index.sym_sizes());
  check_positive(op, "temperature", temperature);
  check_positive(op, "softcap", softcap);
  return {temperature, ignore_index, softcap};
}

Results empty_results(const Tensor& logits, const Tensor& index, bool entropy, bool graph) {
  const auto options = logits.options().dtype(compute_type(logits));
  c10::SymDimVector rows(logits.sym_sizes().begin(), logits.sym_sizes().end() - 1), three = rows;
  three.push_back(3);
  Results out;
  out.log_probs = at::empty_symint(index.sym_sizes(), options);
  if (entropy) out.entropy = at::empty_symint(rows, options);
  if (graph) {
    out.stats = at::empty_symint(three, options);
    out.chosen = at::empty_symint(index.sym_sizes(), options);
  }
  return out;
}

struct Backward : core::Private<
                      Backward,
                      Tensor(
                          const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, double, int64_t, std::optional<double>),
                      core::Overwrites<2>> {
  static constexpr const char* kName = "_log_probs_bwd";
  static constexpr const char* kArguments =
      "grad, grad_entropy, logits, index, stats, chosen, temperature, ignore_index, softcap";

  template <class Device, class... O>
  static Tensor run(
      const Into& into, const OptionalTensor& grad, const OptionalTensor& grad_entropy, const Tensor& logits,
      const Tensor& index, const Tensor& stats, const Tensor& chosen, const O&... options) {
    const Options o = check(kBackward, logits, index, options...);
    auto upstream = [&](const char* name, const OptionalTensor& g, c10::SymIntArrayRef sizes) {
      if (!g || !g->defined()) return Tensor();
      check_same_device(kBackward, name, *g, "logits", logits);
      LIGER_CHECK(g->sym_sizes().equals(sizes), kBackward, name, c10::str("have shape ", sizes), g->sym_sizes());
      return g->to(compute_type(logits)).contiguous();
    };
    const auto rows = logits.sym_sizes().slice(0, logits.dim() - 1);
    const ResultGradients given{
        upstream("the log-probabilities' gradient", grad, index.sym_sizes()),
        upstream("the entropy's gradient", grad_entropy, rows)};
    Tensor dlogits = result_rows(into[0], true, logits);
    Device::backward(kBackward, dlogits, given, logits, index, stats.contiguous(), chosen.contiguous(), o, Columns());
    return dlogits;
  }
};

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// No autocast: under autocast, PyTorch computes log_softmax in float32. This operator does that for logits of any
// dtype, without a copy.
struct LogProbs
    : core::Operator<
          LogProbs,
          std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, int64_t, std::optional<double>, bool)> {
  static constexpr const char* kOp = log_probs::kOp;
  static constexpr const char* kSchema = schemas::log_probs;
  using Edges = core::Positions<0>;
  using Forward = Four;  // log_probs, entropy, stats, chosen
  using Privates = core::Privates<Backward>;
  using Cpu = log_probs::Cpu;
  using Cuda = log_probs::Cuda;
  using Meta = log_probs::Meta;

  template <class Device>
  static Four run(
      bool save, const Tensor& logits, const Tensor& index, double temperature, int64_t ignore_index,
      std::optional<double> softcap, bool entropy) {
    const auto o = check(kOp, logits, index, temperature, ignore_index, softcap);
    Results out = empty_results(logits, index, entropy, save);
    Device::forward(kOp, logits, index, o, out, Columns());
    if (!entropy) {
      c10::SymDimVector none(logits.sym_sizes().begin(), logits.sym_sizes().end());
      none.back() = 0;
      out.entropy = at::empty_symint(none, out.log_probs.options());
    }
    return {out.log_probs, out.entropy, out.stats, out.chosen};
  }

  struct Node : core::BackwardNode<Node, 4> {  // logits, index, stats, chosen
    Options options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    template <class... Rest>
    void record(const Four& out, const Tensor& logits, const Tensor& index, const Rest&...) {
      const auto& [log_probs, entropy, stats, chosen] = out;
      save(logits, index, stats, chosen);
      connect(log_probs);
      if (std::get<3>(options)) connect(entropy);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      Tensor grad = std::move(grads[0]), grad_entropy = grads.size() > 1 ? std::move(grads[1]) : Tensor();
      if (!grad.defined() && !grad_entropy.defined()) return {Tensor()};
      Tensor logits = take(0), index = take(1), stats = take(2), chosen = take(3);
      const auto& [temperature, ignore_index, softcap, entropy] = options;
      return {Backward::call(
          may_overwrite(logits, logits), grad, grad_entropy, logits, index, stats, chosen, temperature, ignore_index,
          softcap)};
    }
  };
};

}  // namespace

LIGER_OPERATOR(LogProbs)

}  // namespace liger::ops::log_probs
