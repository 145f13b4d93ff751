#pragma once

// Divergences of the distributions in the rows of two tensors: kl_div, jsd and tvd.
//
// input: (..., V) of any strides, target: like input, shift_labels: (...) int64 or int32, whose rows with ignore_index
// are not read: their losses and gradients are 0. A dtype narrower than the other's is widened first. Losses are fp32
// (fp64 for fp64 rows). kl_div saves only the target, the others input and target. Backward overwrites the target if
// nothing else can see it.
//
// A Loss has
//   kOp, kBackward        the operator's name, and that of its backward in messages
//   kSchema               its public schema
//   kForwardArguments     the names of the arguments of its private operators
//   kBackwardArguments
//   kSavesInput           whether the gradient depends on the input
//   parse(options...)     checks the options of the schema

#include "core/operator.h"
#include "kernels/divergence.h"
#include "core/rows/rows_in_order.h"
#include "ops/losses/reduction.h"

namespace liger::ops::divergence {

using namespace core;

using at::Tensor;

namespace kinds = kernels::constants::divergence;

struct Options {
  int32_t kind;
  Reduction reduction;
  int64_t ignore_index;
  double parameter = 0;  // eps or beta, see the kernels
  bool batch_is_first_dimension = false;  // of a batchmean without labels
  bool divide = true;  // false: the loss of a mean is still the sum

  bool reduced() const { return reduction != Reduction::None; }
  at::IntArrayRef sizes_of(const Tensor& x) const { return reduced() ? at::IntArrayRef() : x.sizes(); }
  bool divides() const { return reduction == Reduction::Mean || reduction == Reduction::BatchMean; }

  /// What a mean divides by, times the number of rows that count if there are labels.
  int64_t divisor(const Tensor& x, bool labelled) const {
    const int64_t n = x.size(-1), rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
    if (!divides()) return 1;
    if (reduction == Reduction::Mean) return labelled ? n : rows * n;
    return labelled ? 1 : batch_is_first_dimension ? x.size(0) : rows;
  }
};

/// divisor: one number, undefined unless the loss is a mean.
struct Results {
  Tensor loss, divisor;
};

inline Results empty_results(const Tensor& x, const Options& o) {
  const auto options = x.options().dtype(compute_type(x));
  const bool unit = x.sym_strides().back() == 1;
  const auto rows = unit ? options : options.memory_format(at::MemoryFormat::Contiguous);
  Results out;
  out.loss = o.reduced() ? at::empty({}, options) : at::empty_like(x, rows);
  if (o.divides()) out.divisor = at::empty({}, options);
  return out;
}

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
using ForwardOn =
    void(const char* op, Tensor input, Tensor target, const Tensor& labels, const Options& o, Results& out);
/// dinput may be target. input: undefined if the gradient does not depend on it. divisor: undefined unless the loss is
/// a mean.
using BackwardOn = void(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& labels, const Options& o);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Meta {
  static void forward(auto&&...) {}
  static void backward(auto&&...) {}
};

/// O: the types of the options in the schema.
template <class Loss, class... O>
struct Divergence
    : core::Operator<Divergence<Loss, O...>, Tensor(const Tensor&, const Tensor&, const OptionalTensor&, O...)> {
  static constexpr const char *kOp = Loss::kOp, *kSchema = Loss::kSchema;
  using Cpu = divergence::Cpu;
  using Cuda = divergence::Cuda;
  using Meta = divergence::Meta;

  static void check_labels(const char* op, const OptionalTensor& labels, const Tensor& x) {
    if (!labels || !labels->defined()) return;
    check_integers(op, "shift_labels", *labels);
    check_same_device(op, "shift_labels", *labels, "input", x);
    auto rows = x.sym_sizes().slice(0, x.dim() - 1);
    LIGER_CHECK(
        labels->sym_sizes().equals(rows), op, "shift_labels",
        c10::str("have shape ", rows, ", that of input without its last dimension"), labels->sym_sizes());
  }

  /// divide: false if the loss of a mean is to be the sum.
  struct LossAndDivisor
      : core::Private<
            LossAndDivisor,
            std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, O..., bool)> {
    static constexpr const char *kPublic = kSchema, *kArguments = "input..., divide";
    static std::string name() { return Divergence::private_name("_fwd"); }

    template <class Device>
    static std::tuple<Tensor, Tensor> run(
        const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options, bool divide) {
      check_rows(kOp, "input", input);
      check_same(kOp, "target", target, "input", input);
      check_labels(kOp, labels, input);
      divergence::Options o = Loss::parse(options...);
      o.divide = divide;
      Results out = empty_results(input, o);
      Device::forward(kOp, input, target, value_or_undefined(labels), o, out);
      return {out.loss, out.divisor};
    }
  };

  template <class Device>
  static Tensor run(bool, const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    auto [x, t] = promoted(input, target);
    return std::get<0>(LossAndDivisor::template run<Device>(x, t, labels, options..., true));
  }

  struct Backward : core::Private<
                        Backward,
                        Tensor(
                            const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                            const OptionalTensor&, O...),
                        core::Overwrites<3>> {
    static constexpr const char *kPublic = kSchema, *kArguments = "grad, divisor, input...";
    static std::string name() { return Divergence::private_name("_bwd"); }

    template <class Device>
    static Tensor run(
        const std::array<Tensor, 1>& into, const Tensor& grad, const OptionalTensor& divisor,
        const OptionalTensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
      constexpr const char* op = Loss::kBackward;
      check_rows(op, "target", target);
      if (input && input->defined()) check_same(op, "input", *input, "target", target);
      check_labels(op, labels, target);
      const divergence::Options o = Loss::parse(options...);
      Tensor dinput = result_rows(into[0], true, target);
      Device::backward(
          op, dinput, grad, value_or_undefined(divisor), value_or_undefined(input), target, value_or_undefined(labels),
          o);
      return dinput;
    }
  };

  using Privates = core::Privates<LossAndDivisor, Backward>;

  // ---- Autograd

  using Edges = core::Positions<0>;
  using Constants = core::Positions<1>;
  // The divisor, the input if it is needed, target, labels.
  using Saves = core::Saves<core::Result<1>, core::Result<2>, core::Argument<1>, core::Argument<2>>;

  static std::tuple<Tensor, Tensor, Tensor> run_forward(
      const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    at::AutoDispatchBelowADInplaceOrView below;
    // Sums and divisors of a DTensor's shards add up; means do not.
    const bool divide = is_plain(input);
    auto [loss, divisor] = LossAndDivisor::call(input, target, labels, options..., divide);
    if (!divide && divisor.defined()) loss = at::div(loss, divisor);
    return {loss, divisor, Loss::kSavesInput ? input : Tensor()};
  }

  static variable_list backward(auto& node, variable_list&& grads) {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor()};
    Tensor divisor = node.take(0), input = node.take(1), target = node.take(2), labels = node.take(3);
    return {with_options(node.options, [&](const auto&... o) {
      return Backward::call(node.may_overwrite(target, target), grad, divisor, input, target, labels, o...);
    })};
  }

  /// Both in the wider dtype, as PyTorch's own losses compute. Differentiable above autograd.
  static std::array<Tensor, 2> promoted(const Tensor& input, const Tensor& target) {
    const auto a = input.scalar_type(), b = target.scalar_type();
    if (a == b || !at::isFloatingType(a) || !at::isFloatingType(b)) return {input, target};
    if (!core::has_memory(input)) core::refuse_memory(kOp, "input", input);
    if (!core::has_memory(target)) core::refuse_memory(kOp, "target", target);
    const auto wide = at::promote_types(a, b);
    return {input.to(wide), target.to(wide)};
  }

  static Tensor autograd(const Tensor& input, const Tensor& target, const OptionalTensor& labels, O... options) {
    const bool differ = input.scalar_type() != target.scalar_type();
    if (!differ || !torch::autograd::compute_requires_grad(input)) {
      return Divergence::Operator::autograd(input, target, labels, options...);
    }
    Divergence::check_tensors(input, target, labels, options...);
    const auto [x, t] = promoted(input, target);
    return Divergence::Operator::autograd(x, t, labels, options...);
  }

  static void implement_autograd(torch::Library& m) { m.impl(kOp, autograd); }
};

}  // namespace liger::ops::divergence
