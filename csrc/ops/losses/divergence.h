#pragma once

// Divergences of the distributions in the rows of two tensors: kl_div, jsd and tvd.
//
// input: (..., V) of any strides, target: like input, shift_labels: (...) int64 or int32, whose rows with ignore_index
// are not read: their losses and gradients are 0. A dtype narrower than the other's is widened first. Losses are fp32
// (fp64 for fp64 rows). kl_div saves only the target, the others input and target. Backward overwrites the target if
// nothing else can see it.
//
// A Loss has
//   kOp, kBackward                                the operator's name, and that of its backward in messages
//   kForward, kGradient, kOverwriting             the names of its private operators
//   kSavesInput                                   whether the gradient depends on the input
//   parse(options...)                             checks the options of the schema

#include "core/operator.h"
#include "core/rows.h"
#include "kernels/divergence.h"
#include "ops/losses/rows_in_order.h"

namespace liger::ops::divergence {

using namespace core;

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace kinds = kernels::constants::divergence;

enum class Reduction { None, Sum, Mean, BatchMean };

struct Options {
  int32_t kind;
  Reduction reduction;
  int64_t ignore_index;
  double parameter = 0;  // eps or beta, see the kernels
  bool batch_is_first_dimension = false;  // of a batchmean without labels
  bool divide = true;  // false: the loss of a mean is still the sum

  bool reduced() const { return reduction != Reduction::None; }
  bool divides() const { return reduction == Reduction::Mean || reduction == Reduction::BatchMean; }

  /// What a mean divides by, times the number of rows that count if there are labels.
  int64_t divisor(const Tensor& x, bool labelled) const {
    const int64_t n = x.size(-1), rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
    if (!divides()) return 1;
    if (reduction == Reduction::Mean) return labelled ? n : rows * n;
    return labelled ? 1 : batch_is_first_dimension ? x.size(0) : rows;
  }
};

inline Reduction parse_reduction(const char* op, c10::string_view reduction) {
  if (reduction == "none") return Reduction::None;
  if (reduction == "sum") return Reduction::Sum;
  if (reduction == "mean") return Reduction::Mean;
  LIGER_CHECK(
      reduction == "batchmean", op, "reduction", "be 'mean', 'batchmean', 'sum' or 'none'", "'", reduction, "'");
  return Reduction::BatchMean;
}

/// divisor: one number, undefined unless the loss is a mean.
struct Results {
  Tensor loss, divisor;
};

inline Results empty_results(const Tensor& x, const Options& o) {
  const auto options = x.options().dtype(compute_type(x));
  Results out;
  const bool unit = x.sym_strides().back() == 1;
  out.loss = o.reduced() ? at::empty({}, options)
      : unit             ? at::empty_like(x, options)
                         : at::empty_like(x, options.memory_format(at::MemoryFormat::Contiguous));
  if (o.divides()) out.divisor = at::empty({}, options);
  return out;
}

/// The incoming gradient: one number, or one per element, in the compute type.
struct Upstream {
  Tensor values;
  bool single;

  Upstream(const char* op, const Tensor& grad, const Tensor& x, const Options& o) {
    auto expected = o.reduced() ? at::IntArrayRef() : x.sizes();
    LIGER_CHECK(grad.sizes().equals(expected), op, "the gradient", c10::str("have shape ", expected), grad.sizes());
    check_same_device(op, "the gradient", grad, "target", x);
    const auto strides = grad.strides();
    // As a sum's backward makes it.
    single =
        grad.numel() > 0 && std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 0; });
    values = (single ? grad.as_strided({}, {}) : grad).to(compute_type(x));
  }
};

/// The rows of tensors of one shape, in the order of the labels. Tensors of one dense layout are one long row if
/// nothing depends on the rows, or if they are contiguous and at least `whole` columns long.
template <size_t N>
Rows<N> walk(const char* op, const std::array<Tensor*, N>& tensors, const Tensor& labels, int64_t whole) {
  const Tensor& first = *tensors[0];
  bool alike = first.is_non_overlapping_and_dense();
  for (Tensor* t : tensors) alike = alike && core::same_strides(first, *t);
  if (!alike || (labels.defined() && !(first.is_contiguous() && first.size(-1) >= whole))) {
    return rows_in_order<N>(op, "input", tensors);
  }
  Rows<N> out;
  out.rows = 1;
  out.n = first.numel();
  return out;
}

/// labels: undefined if all rows count.
void forward_cpu(const char* op, Tensor input, Tensor target, const Tensor& labels, const Options& o, Results& out);
void forward_cuda(const char* op, Tensor input, Tensor target, const Tensor& labels, const Options& o, Results& out);

/// dinput may be target. input: undefined if the gradient does not depend on it. divisor: undefined unless the loss is
/// a mean.
void backward_cpu(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& labels, const Options& o);
void backward_cuda(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& labels, const Options& o);

struct Cpu {
  static constexpr auto forward = forward_cpu;
  static constexpr auto backward = backward_cpu;
};

struct Cuda {
  static constexpr auto forward = forward_cuda;
  static constexpr auto backward = backward_cuda;
};

struct Meta {
  static void forward(const char*, Tensor, Tensor, const Tensor&, const Options&, Results&) {}
  static void backward(
      const char*, Tensor&, const Tensor&, const Tensor&, Tensor, Tensor, const Tensor&, const Options&) {}
};

template <class T>
using Owned = std::conditional_t<std::is_same_v<T, c10::string_view>, std::string, T>;

/// O: the types of the options in the schema.
template <class Loss, class... O>
struct Divergence {
  static constexpr const char* kOp = Loss::kOp;

  static void check_labels(const char* op, const OptionalTensor& labels, const Tensor& x) {
    if (!labels || !labels->defined()) return;
    check_integers(op, "shift_labels", *labels);
    check_same_device(op, "shift_labels", *labels, "input", x);
    auto rows = x.sym_sizes().slice(0, x.dim() - 1);
    LIGER_CHECK(
        labels->sym_sizes().equals(rows), op, "shift_labels",
        c10::str("have shape ", rows, ", that of input without its last dimension"), labels->sym_sizes());
  }

  static Options check(const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    check_rows(kOp, "input", input);
    check_same(kOp, "target", target, "input", input);
    check_labels(kOp, labels, input);
    return Loss::parse(options...);
  }

  // ---- The dispatched ops

  template <class Device>
  static std::tuple<Tensor, Tensor> fwd(
      const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options, bool divide) {
    Options o = check(input, target, labels, options...);
    o.divide = divide;
    Results out = empty_results(input, o);
    Device::forward(kOp, input, target, value_or_undefined(labels), o, out);
    return {out.loss, out.divisor};
  }

  template <class Device>
  static Tensor apply(const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    auto [x, t] = promoted(input, target);
    return std::get<0>(fwd<Device>(x, t, labels, options..., true));
  }

  static Options check_backward(
      const OptionalTensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    check_rows(Loss::kBackward, "target", target);
    if (input && input->defined()) check_same(Loss::kBackward, "input", *input, "target", target);
    check_labels(Loss::kBackward, labels, target);
    return Loss::parse(options...);
  }

  template <class Device>
  static Tensor bwd(
      const Tensor& grad, const OptionalTensor& divisor, const OptionalTensor& input, const Tensor& target,
      const OptionalTensor& labels, O... options) {
    Options o = check_backward(input, target, labels, options...);
    Tensor dinput = empty_rows_like(target);
    Device::backward(
        Loss::kBackward, dinput, grad, value_or_undefined(divisor), value_or_undefined(input), target,
        value_or_undefined(labels), o);
    return dinput;
  }

  /// Overwrites the target with the gradient.
  template <class Device>
  static void bwd_(
      const Tensor& grad, const OptionalTensor& divisor, const OptionalTensor& input, Tensor& target,
      const OptionalTensor& labels, O... options) {
    Options o = check_backward(input, target, labels, options...);
    Device::backward(
        Loss::kBackward, target, grad, value_or_undefined(divisor), value_or_undefined(input), target,
        value_or_undefined(labels), o);
  }

  // ---- Autograd

  struct Node : BackwardNode<Node, 4> {  // divisor, input, target, labels
    std::tuple<Owned<O>...> options;

    auto state() {
      return std::apply([](auto&... each) { return std::tie(each...); }, options);
    }

    std::string name() const override { return kOp; }

    variable_list backward(variable_list&& grads) override {
      Tensor grad = std::move(grads[0]);
      if (!grad.defined()) return {Tensor()};
      Tensor divisor = this->take(0), input = this->take(1), target = this->take(2), labels = this->take(3);
      return std::apply(
          [&](const auto&... o) -> variable_list {
            if (this->may_overwrite(target, target)) {
              static const auto op = find_op<decltype(bwd_<Meta>)>(Loss::kOverwriting);
              op.call(grad, divisor, input, target, labels, o...);
              return {target.detach()};
            }
            static const auto op = find_op<decltype(bwd<Meta>)>(Loss::kGradient);
            return {op.call(grad, divisor, input, target, labels, o...)};
          },
          options);
    }
  };

  /// Both in the wider dtype, as PyTorch's own losses compute. Differentiable above autograd.
  static std::array<Tensor, 2> promoted(const Tensor& input, const Tensor& target) {
    const auto a = input.scalar_type(), b = target.scalar_type();
    if (a == b || !at::isFloatingType(a) || !at::isFloatingType(b)) return {input, target};
    if (!has_memory(input)) core::detail::refuse_argument(kOp, 0, "", input);
    if (!has_memory(target)) core::detail::refuse_argument(kOp, 1, "", target);
    const auto wide = at::promote_types(a, b);
    return {input.to(wide), target.to(wide)};
  }

  static Tensor autograd(const Tensor& input, const Tensor& given_target, const OptionalTensor& labels, O... options) {
    check_dense(kOp, "input", input);
    check_dense(kOp, "target", given_target);
    check_dense(kOp, "shift_labels", labels);
    check_no_forward_ad(kOp, input, given_target);
    const bool learned = torch::autograd::compute_requires_grad(given_target);
    LIGER_CHECK(!learned, kOp, "target", "not require a gradient", "one that does");
    if (!torch::autograd::compute_requires_grad(input)) {
      static const auto op = find_op<decltype(apply<Meta>)>(Loss::kOp);
      at::AutoDispatchBelowADInplaceOrView below;
      return op.call(input, given_target, labels, options...);
    }
    auto [x, target] = promoted(input, given_target);
    static const auto op = find_op<decltype(fwd<Meta>)>(Loss::kForward);
    Results out;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      // Sums and divisors of a DTensor's shards add up; means do not.
      const bool divide = is_plain(x);
      std::tie(out.loss, out.divisor) = op.call(x, target, labels, options..., divide);
      if (!divide && out.divisor.defined()) out.loss = at::div(out.loss, out.divisor);
    }
    auto node = make_node<Node>();
    node->options = {Owned<O>(options)...};
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->saved = {
        SavedVariable(out.divisor, false), SavedVariable(Loss::kSavesInput ? x : Tensor(), false),
        SavedVariable(target, false), SavedVariable(labels, false)};
    torch::autograd::set_history(out.loss, node);
    return out.loss;
  }

  // ---- Registration

  /// schema: the public operator's options, with defaults.
  static void define(torch::Library& m, const std::string& schema) {
    const std::string op = kOp, options = without_defaults(schema);
    const std::string saved = "Tensor? divisor, Tensor? input, ", labels = "Tensor? shift_labels, ";
    core::define(m, op + "(Tensor input, Tensor target, Tensor? shift_labels=None, " + schema + ") -> Tensor");
    core::define(
        m, "_" + op + "_fwd(Tensor input, Tensor target, " + labels + options + ", bool divide) -> (Tensor, Tensor)");
    core::define(m, "_" + op + "_bwd(Tensor grad, " + saved + "Tensor target, " + labels + options + ") -> Tensor");
    core::define(m, "_" + op + "_bwd_(Tensor grad, " + saved + "Tensor(a!) target, " + labels + options + ") -> ()");
  }

  static std::string without_defaults(const std::string& schema) {
    std::string out;
    bool in_default = false;
    for (char c : schema) {
      in_default = c == '=' || (in_default && c != ',');
      if (!in_default) out += c;
    }
    return out;
  }

  template <class Device>
  static void implement(torch::Library& m) {
    const std::string op = kOp;
    core::implement<apply<Device>>(m, op);
    core::implement<fwd<Device>>(m, "_" + op + "_fwd");
    core::implement<bwd<Device>>(m, "_" + op + "_bwd");
    core::implement<bwd_<Device>>(m, "_" + op + "_bwd_");
  }
};

}  // namespace liger::ops::divergence
