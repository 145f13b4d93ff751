// fused_linear_divergence(s_input, s_weight, t_input, t_weight, ...): the divergence of a student's predictions from a
// teacher's, and the student's entropy, from logits that exist for a part of the tokens at a time,
//
//   logits = softcap(logits_scale * (input @ weight.T + bias)) / temperature
//
// s_input: (..., Hs), s_weight: (V, Hs), t_input: (..., Ht), t_weight: (V, Ht), s_bias, t_bias: (V,), mask: (...) bool,
// token_weight: (...). The tensors of one model have one dtype; the models may differ. beta 0: KL(teacher || student),
// 1: KL(student || teacher), between: the Jensen-Shannon divergence with the mixture (1 - beta) p_s + beta p_t. Only the
// divergence has a gradient, by the student's tensors.
//
// Logits are fp32 (fp64 for fp64): rounded to 16 bits, the logits of close models would lose their difference. Each
// part of a chunk computes both models' logits and then, row by row, the results and the gradient of the student's
// logits in its dtype. A whole chunk of these gradients then takes the GEMMs of d input and d weight: d weight is read
// and written once per chunk, and rounded as often.
//
// A reduced divergence computes the gradients in forward: four GEMMs. Backward multiplies them by the incoming gradient,
// on the device, and writes nothing if that is 1. Per token, the gradient of the input alone is also computed in
// forward, because it is linear in each token's incoming gradient: three GEMMs. With a trained head, backward computes
// the logits again: six GEMMs.
//
// fp16 cannot represent small gradients: see fused_linear_cross_entropy.cpp on the deferred scale.

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"
#include "gemm/multiply.h"
#include "ops/losses/fused_linear_cross_entropy.h"
#include "ops/losses/fused_linear_divergence.h"
#include "runtime/status.h"

namespace liger::ops::fused_linear_divergence {
namespace {

constexpr const char* kOp = "fused_linear_divergence";
constexpr const char* kBackward = "fused_linear_divergence backward";

struct Cpu {
  static void begin() { runtime::count_cpu_call(); }
  static void rows(const Rows& r) { rows_cpu(r); }
};
struct Cuda {
  static void begin() {}
  static void rows(const Rows& r) { rows_cuda(r); }
};
struct Meta {};

/// Gradients to compute.
struct Wanted {
  bool input = false, weight = false, bias = false;

  bool any() const { return input || weight || bias; }
  int64_t bits() const { return wanted_bits(input, weight, bias); }
  static Wanted from_bits(int64_t bits) {
    return {(bits & kWantInput) != 0, (bits & kWantWeight) != 0, (bits & kWantBias) != 0};
  }
};

/// The tensors of a call. Undefined ones were not given.
struct Arguments {
  Tensor s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight;

  at::ScalarType compute() const { return s_input.scalar_type() == at::kDouble ? at::kDouble : compute_type(t_input); }
  at::TensorOptions numbers() const { return s_input.options().dtype(compute()); }
};

struct Gradients {
  Tensor input, weight, bias;
};

/// stats: (5, tokens). deferred_scale: factors that backward applies, (of input's gradient, of weight's and bias's);
/// undefined: 1.
struct Results {
  Tensor divergence, entropy, stats, deferred_scale;
  Gradients gradients;
};

// ---- Checks

void check_model(
    const char* op, const char* input_name, const char* weight_name, const char* bias_name, const Tensor& input,
    const Tensor& weight, const Tensor& bias, const Tensor& like) {
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
      weight.sym_sizes());
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

void check_arguments(const char* op, const Arguments& a) {
  check_model(op, "s_input", "s_weight", "s_bias", a.s_input, a.s_weight, a.s_bias, a.s_input);
  check_model(op, "t_input", "t_weight", "t_bias", a.t_input, a.t_weight, a.t_bias, a.s_input);
  const auto tokens = a.s_input.sym_sizes().slice(0, a.s_input.dim() - 1);
  LIGER_CHECK(
      a.t_input.sym_sizes().slice(0, a.t_input.dim() - 1).equals(tokens), op, "t_input",
      c10::str("have shape ", tokens, " and one dimension more, like s_input"), a.t_input.sym_sizes());
  LIGER_CHECK(
      a.t_weight.sym_size(0) == a.s_weight.sym_size(0), op, "t_weight",
      c10::str("have ", a.s_weight.sym_size(0), " classes like s_weight"), a.t_weight.sym_size(0));
  auto check_tokens = [&](const char* name, const Tensor& t) {
    check_dense(op, name, t);
    check_same_device(op, name, t, "s_input", a.s_input);
    LIGER_CHECK(
        t.sym_sizes().equals(tokens), op, name,
        c10::str("have shape ", tokens, ", that of s_input without its last dimension"), t.sym_sizes());
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
    std::optional<double> t_softcap, c10::string_view reduction, std::optional<int64_t> memory_budget) {
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
  return {beta, temperature, {s_scale, s_softcap}, {t_scale, t_softcap}, kind, memory_budget};
}

// ---- Results

Gradients empty_gradients(const Arguments& a, Wanted wanted) {
  auto like = [](bool asked, const Tensor& t, at::MemoryFormat format) {
    return asked ? at::empty_like(t, t.options().memory_format(format)) : Tensor();
  };
  return {
      like(wanted.input, a.s_input, at::MemoryFormat::Contiguous),
      like(wanted.weight, a.s_weight, at::MemoryFormat::Preserve),
      like(wanted.bias, a.s_bias, at::MemoryFormat::Contiguous)};
}

/// True if forward computes the gradients.
bool computes_now(const Options& o, Wanted wanted) {
  return wanted.any() && (o.reduced() || !(wanted.weight || wanted.bias));
}

Results empty_results(const Arguments& a, const Options& o, Wanted wanted) {
  const auto tokens = a.s_input.sym_sizes().slice(0, a.s_input.dim() - 1);
  Results out;
  out.divergence = at::empty_symint(o.reduced() ? c10::SymIntArrayRef() : tokens, a.numbers());
  out.entropy = at::empty_symint(tokens, a.numbers());
  if (computes_now(o, wanted)) {
    out.gradients = empty_gradients(a, wanted);
    const bool half = a.s_input.scalar_type() == at::kHalf;
    if (half && o.reduced()) out.deferred_scale = at::empty({2}, a.numbers());
  } else if (wanted.any()) {
    out.stats = at::empty_symint({5, out.entropy.sym_numel()}, a.numbers());
  }
  return out;
}

// ---- The loop over chunks

/// Tokens per chunk, whose gradients exist at the same time, and per part of a chunk, whose logits do.
struct Plan {
  int64_t chunk = 1, part = 1, row = 0;  // row: columns of a buffer, whole cache lines
};

/// gradients: computed by this call. differentiable: computed by this call or a later one.
Plan make_plan(
    const char* op, const Arguments& a, int64_t tokens, bool gradients, bool differentiable,
    std::optional<int64_t> given) {
  constexpr int64_t kMiB = 1 << 20, kTile = 256, kLine = 64, kMostParts = 8, kMostTokens = 8192;
  const int64_t element = a.s_input.element_size(), wide = c10::elementSize(a.compute());
  Plan plan;
  plan.row = (a.s_weight.size(0) + kLine - 1) / kLine * kLine;
  // The student's logits become their gradient where both have one dtype. Some 100 numbers per row are statistics of
  // the row's parts.
  const bool in_place = gradients && element == wide;
  const int64_t per_part = (in_place ? 1 : 2) * plan.row * wide + 400, per_chunk = gradients ? plan.row * element : 0;
  const int64_t per_token = 24;
  auto bytes = [&](int64_t chunk, int64_t part) { return chunk * per_chunk + part * per_part; };
  // Enough for GEMMs at full speed. Calls without gradients should take less.
  const int64_t usual = std::max((differentiable ? 1280 : 320) * kMiB, bytes(kTile / 2, kTile / 2));
  const int64_t budget = given.value_or(usual + tokens * per_token) - tokens * per_token;
  LIGER_CHECK(
      budget >= bytes(1, 1) || tokens == 0, op, "memory_budget",
      c10::str("be at least ", bytes(1, 1) + tokens * per_token, " bytes for the logits of one of ", tokens, " tokens"),
      given.value_or(0));
  auto rounded = [](int64_t n, int64_t tile) { return (n + tile - 1) / tile * tile; };
  // Few large chunks are best, of parts that have no less than a tile of tokens.
  for (int64_t chunks = std::max<int64_t>(1, (tokens + kMostTokens - 1) / kMostTokens); tokens / chunks >= kTile;
       ++chunks) {
    const int64_t chunk = chunks == 1 ? tokens : rounded((tokens + chunks - 1) / chunks, kTile);
    for (int64_t parts = 1; parts <= kMostParts; parts *= 2) {
      const int64_t part = std::min(chunk, rounded((chunk + parts - 1) / parts, kTile));
      if (bytes(chunk, part) > budget) continue;
      plan.chunk = chunk;
      plan.part = part;
      return plan;
    }
  }
  const int64_t most = std::max<int64_t>(1, std::min(budget / bytes(1, 1), kMostTokens)), tile = kTile / 4;
  plan.chunk = plan.part = std::max<int64_t>(1, std::min(tokens, most > tile ? most / tile * tile : most));
  return plan;
}

/// Tokens as rows of unit stride, which GEMMs require.
Tensor as_rows(const Tensor& input, int64_t tokens) {
  Tensor x = input.reshape({tokens, input.size(-1)});
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

Tensor flat(const Tensor& t) { return t.defined() ? t.reshape(-1).contiguous() : t; }

/// out = x @ weight.T in out's dtype, which is at least that of x.
void project(Tensor& out, const Tensor& x, const Tensor& weight, bool sustained) {
  if (x.size(1) == 0) {
    out.zero_();
  } else if (x.scalar_type() == out.scalar_type()) {
    gemm::multiply(out, x, weight.t(), 0, 1, sustained);
  } else if (x.is_cuda()) {
    at::mm_out(out, x, weight.t(), out.scalar_type());
  } else {
    // Some classes at a time, so that no wide copy of the weight exists.
    constexpr int64_t kBlock = 1 << 20;
    const int64_t classes = weight.size(0), step = std::max<int64_t>(64, kBlock / x.size(1));
    const Tensor wide = x.to(out.scalar_type());
    for (int64_t first = 0; first < classes; first += step) {
      const int64_t count = std::min(step, classes - first);
      Tensor columns = out.narrow(1, first, count);
      at::mm_out(columns, wide, weight.narrow(0, first, count).to(out.scalar_type()).t());
    }
  }
}

/// One call's state while it loops over the chunks.
template <class Device>
class Pass {
 public:
  const char* op;
  const Options& o;
  const int64_t tokens, classes;
  const Tensor s, t;  // (tokens, H)
  Tensor mask, factor;  // (tokens,); factor: the token weights, 0 where the mask is false
  Tensor divergence, entropy, grad, stats;  // (tokens,), stats (5, tokens); see Rows
  bool known = false;
  double shrink = 1;  // scale of d weight and d bias

  Pass(const char* name, const Arguments& arguments, const Options& options)
      : op(name),
        o(options),
        tokens(c10::multiply_integers(arguments.s_input.sizes().slice(0, arguments.s_input.dim() - 1))),
        classes(arguments.s_weight.size(0)),
        s(as_rows(arguments.s_input, tokens)),
        t(as_rows(arguments.t_input, tokens)),
        mask(flat(arguments.mask)),
        a_(arguments) {
    Device::begin();
    const auto compute = a_.compute();
    if (a_.token_weight.defined()) {
      factor = flat(a_.token_weight).to(compute);
      if (mask.defined()) factor = factor.masked_fill(mask.logical_not(), 0);
    }
    auto wide_bias = [&](const Tensor& bias) {
      if (!bias.defined()) return bias;
      Tensor out = bias.to(compute).contiguous();
      return aligned16(address(out)) ? out : out.clone();
    };
    s_bias_ = wide_bias(a_.s_bias);
    t_bias_ = wide_bias(a_.t_bias);
  }

  /// What a mean divides by.
  Tensor total() const {
    if (factor.defined()) return factor.sum();
    if (mask.defined()) return mask.sum(a_.compute());
    return at::scalar_tensor(double(tokens), a_.numbers());
  }

  void run(Gradients into) {
    const bool gradients = into.input.defined() || into.weight.defined() || into.bias.defined();
    if (tokens == 0 || classes == 0) {
      for (Tensor* each : {&divergence, &entropy, &into.input, &into.weight, &into.bias, &stats}) {
        if (each->defined() && !known) each->zero_();
      }
      return;
    }
    const Plan plan = make_plan(op, a_, tokens, gradients, gradients || stats.defined(), o.memory_budget);
    const double width = double(s.size(1));
    const bool sustained = 3 * double(tokens) * double(classes) * width >= kSustainedMultiplications;
    // On CPU, rows have no gaps: see fused_linear_cross_entropy_pass.h.
    const int64_t row = s.is_cuda() ? plan.row : classes;
    auto buffer = [&](int64_t rows, at::ScalarType type) { return at::empty({rows, row}, s.options().dtype(type)); };
    const bool in_place = s.scalar_type() == a_.compute();
    Tensor dlogits, logits, t_logits = buffer(plan.part, a_.compute());
    if (gradients) dlogits = buffer(plan.chunk, s.scalar_type());
    if (!gradients || !in_place) logits = buffer(plan.part, a_.compute());
    Tensor bias_sum;
    if (into.bias.defined()) bias_sum = at::zeros({classes}, a_.numbers());
    if (into.input.defined()) into.input = into.input.view({tokens, s.size(1)});
    auto rows_of = [&](const Tensor& t, int64_t first, int64_t count) {
      return t.narrow(0, first, count).narrow(1, 0, classes);
    };
    for (int64_t first = 0; first < tokens; first += plan.chunk) {
      const int64_t count = std::min(plan.chunk, tokens - first);
      for (int64_t at = 0; at < count; at += plan.part) {
        const int64_t rows = std::min(plan.part, count - at), token = first + at;
        auto of_tokens = [&](const Tensor& t) { return t.defined() ? t.narrow(-1, token, rows) : t; };
        Rows r{
            op,
            o,
            {},
            rows_of(t_logits, 0, rows),
            s_bias_,
            t_bias_,
            of_tokens(mask),
            of_tokens(grad),
            {},
            of_tokens(stats),
            known,
            of_tokens(divergence),
            of_tokens(entropy)};
        if (gradients) r.dlogits = rows_of(dlogits, at, rows);
        r.student = logits.defined() ? rows_of(logits, 0, rows) : r.dlogits;
        project(r.student, s.narrow(0, token, rows), a_.s_weight, sustained);
        project(r.teacher, t.narrow(0, token, rows), a_.t_weight, sustained);
        Device::rows(r);
      }
      if (gradients) add(into, bias_sum, rows_of(dlogits, 0, count), first, sustained);
    }
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
  }

 private:
  // See fused_linear_cross_entropy_pass.h.
  static constexpr double kSustainedMultiplications = double(int64_t(1) << 42);

  /// Adds a chunk's gradients.
  void add(const Gradients& into, Tensor& bias_sum, const Tensor& dlogits, int64_t first, bool sustained) const {
    const double scale = o.student.scale;
    const int64_t count = dlogits.size(0);
    if (into.input.defined()) {
      gemm::multiply(into.input.narrow(0, first, count), dlogits, a_.s_weight, 0, scale, sustained);
    }
    if (bias_sum.defined()) bias_sum.add_(dlogits.sum(0, false, bias_sum.scalar_type()), scale * shrink);
    if (into.weight.defined()) {
      gemm::multiply(into.weight, dlogits.t(), s.narrow(0, first, count), first > 0, scale * shrink, sustained);
    }
  }

  const Arguments& a_;
  Tensor s_bias_, t_bias_;
};

/// 1 / total, and 0 if there is nothing to divide: gradients are then 0, not 0 / 0.
Tensor inverse_of(const Tensor& total) { return at::where(total == 0, at::zeros_like(total), total.reciprocal()); }

/// given_total: what a mean divides by, if it is not the sum of this call's weights.
template <class Device>
Results forward(const Arguments& a, const Options& o, Wanted wanted, const Tensor& given_total) {
  Results out = empty_results(a, o, wanted);
  if constexpr (!std::is_same_v<Device, Meta>) {
    c10::DeviceGuard guard(a.s_input.device());
    const bool now = computes_now(o, wanted);
    Pass<Device> pass(kOp, a, o);
    pass.entropy = out.entropy.view({pass.tokens});
    pass.divergence = o.reduced() ? at::empty({pass.tokens}, a.numbers()) : out.divergence.view({pass.tokens});
    pass.stats = out.stats;
    Tensor total;
    if (o.mean()) total = given_total.defined() ? given_total.to(a.compute()) : pass.total();
    if (now) pass.grad = pass.factor;
    if (now && out.deferred_scale.defined()) {
      int64_t halvings = 0;
      while ((int64_t(1) << (2 * halvings)) < pass.tokens) ++halvings;
      pass.shrink = std::ldexp(1.0, -int(halvings));
      out.deferred_scale.select(0, 0).fill_(1);
      out.deferred_scale.select(0, 1).fill_(std::ldexp(1.0, int(halvings)));
      if (o.mean()) out.deferred_scale.mul_(inverse_of(total));
    } else if (now && o.mean()) {
      const Tensor inverse = inverse_of(total);
      pass.grad = pass.factor.defined() ? pass.factor * inverse : inverse.expand({pass.tokens}).contiguous();
    }
    pass.run(now ? out.gradients : Gradients());
    if (pass.factor.defined()) pass.divergence.mul_(pass.factor);
    if (o.reduced()) at::sum_out(out.divergence, pass.divergence, at::OptionalIntArrayRef());
    if (o.mean()) out.divergence.div_(total);
  }
  return out;
}

/// For a trained head and reduction="none": computes the logits again.
template <class Device>
Gradients backward(const Tensor& grad, const Arguments& a, const Options& o, const Tensor& stats, Wanted wanted) {
  Gradients out = empty_gradients(a, wanted);
  if constexpr (!std::is_same_v<Device, Meta>) {
    c10::DeviceGuard guard(a.s_input.device());
    const auto tokens = a.s_input.sizes().slice(0, a.s_input.dim() - 1);
    LIGER_CHECK(grad.sizes().equals(tokens), kBackward, "the gradient", c10::str("have shape ", tokens), grad.sizes());
    Pass<Device> pass(kBackward, a, o);
    pass.grad = flat(grad).to(a.compute());
    if (pass.factor.defined()) pass.grad = pass.grad * pass.factor;
    pass.stats = stats;
    pass.known = pass.tokens > 0 && pass.classes > 0;
    pass.run(out);
  }
  return out;
}

// ---- The dispatched ops

using Cap = std::optional<double>;
using Budget = std::optional<int64_t>;

Arguments arguments_of(
    const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, const OptionalTensor& mask,
    const OptionalTensor& token_weight) {
  return {
      s_input,
      s_weight,
      t_input,
      t_weight,
      value_or_undefined(s_bias),
      value_or_undefined(t_bias),
      value_or_undefined(mask),
      value_or_undefined(token_weight)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fwd(
    const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, const OptionalTensor& mask,
    const OptionalTensor& token_weight, const OptionalTensor& total, double beta, double temperature,
    double s_logits_scale, Cap s_softcap, double t_logits_scale, Cap t_softcap, c10::string_view reduction,
    Budget memory_budget, int64_t wanted) {
  const Arguments a = arguments_of(s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight);
  const Options o =
      parse(kOp, beta, temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, reduction, memory_budget);
  check_arguments(kOp, a);
  Results out = forward<Device>(a, o, Wanted::from_bits(wanted), value_or_undefined(total));
  return {out.divergence,     out.entropy, out.gradients.input, out.gradients.weight,
          out.gradients.bias, out.stats,   out.deferred_scale};
}

template <class Device>
std::tuple<Tensor, Tensor> apply(
    const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, double beta, double temperature, double s_logits_scale,
    Cap s_softcap, double t_logits_scale, Cap t_softcap, const OptionalTensor& mask, c10::string_view reduction,
    const OptionalTensor& token_weight, Budget memory_budget) {
  auto found = fwd<Device>(
      s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, {}, beta, temperature, s_logits_scale,
      s_softcap, t_logits_scale, t_softcap, reduction, memory_budget, 0);
  return {std::get<0>(found), std::get<1>(found)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> bwd(
    const Tensor& grad, const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, const OptionalTensor& mask,
    const OptionalTensor& token_weight, const Tensor& stats, double beta, double temperature, double s_logits_scale,
    Cap s_softcap, double t_logits_scale, Cap t_softcap, Budget memory_budget, int64_t wanted) {
  const Arguments a = arguments_of(s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight);
  const Options o =
      parse(kBackward, beta, temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, "none", memory_budget);
  check_arguments(kBackward, a);
  Gradients out = backward<Device>(grad, a, o, stats, Wanted::from_bits(wanted));
  return {out.input, out.weight, out.bias};
}

template <class Device>
void implement(torch::Library& m) {
  core::implement<apply<Device>>(m, kOp);
  core::implement<fwd<Device>>(m, "_fused_linear_divergence_fwd");
  core::implement<bwd<Device>>(m, "_fused_linear_divergence_bwd");
}

// ---- Autograd

struct ReducedNode : core::BackwardNode<ReducedNode, 4> {  // gradients of input, weight, bias; scale
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
    core::variable_list out;
    Tensor deferred_scale = take(3);
    for (size_t i = 0; i < 3; ++i) {
      Tensor gradient = take(i);
      if (gradient.defined()) {
        Tensor factor = deferred_scale.defined() ? grad * deferred_scale.select(0, i > 0) : grad;
        gradient = fused_linear_cross_entropy::scaled(kBackward, gradient, factor, may_overwrite(gradient, gradient));
      }
      out.push_back(std::move(gradient));
    }
    return out;
  }
};

struct FrozenHeadNode : core::BackwardNode<FrozenHeadNode, 1> {  // gradient of input for incoming gradients of 1
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor gradient = take(0), factor = grad.unsqueeze(-1);
    if (!core::is_plain(gradient)) return {at::mul(gradient, factor).to(gradient.scalar_type()), Tensor(), Tensor()};
    // Both multiply in the wider dtype, without a tensor of it.
    if (may_overwrite(gradient, gradient)) return {gradient.mul_(factor), Tensor(), Tensor()};
    Tensor out = at::empty_like(gradient);
    return {at::mul_out(out, gradient, factor), Tensor(), Tensor()};
  }
};

// s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, stats
struct TrainedHeadNode : core::BackwardNode<TrainedHeadNode, 9> {
  double beta, temperature, s_logits_scale, t_logits_scale;
  Cap s_softcap, t_softcap;
  Budget memory_budget;
  int64_t wanted;

  auto state() {
    return std::tie(beta, temperature, s_logits_scale, t_logits_scale, s_softcap, t_softcap, memory_budget, wanted);
  }

  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
    std::array<Tensor, 9> given;
    for (size_t i = 0; i < given.size(); ++i) given[i] = take(i);
    static const auto op = core::find_op<decltype(bwd<Meta>)>("liger::_fused_linear_divergence_bwd");
    auto [dinput, dweight, dbias] = op.call(
        grad, given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7], given[8], beta,
        temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, memory_budget, wanted);
    return {dinput, dweight, dbias};
  }
};

std::tuple<Tensor, Tensor> autograd(
    const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, double beta, double temperature, double s_logits_scale,
    Cap s_softcap, double t_logits_scale, Cap t_softcap, const OptionalTensor& mask, c10::string_view reduction,
    const OptionalTensor& token_weight, Budget memory_budget) {
  core::check_dense(kOp, "s_input", s_input);
  core::check_dense(kOp, "s_weight", s_weight);
  core::check_dense(kOp, "t_input", t_input);
  core::check_dense(kOp, "t_weight", t_weight);
  core::check_no_forward_ad(kOp, s_input, s_weight, t_input, t_weight, s_bias, t_bias, token_weight);
  auto check_constant = [&](const char* name, const OptionalTensor& t) {
    const bool learned = torch::autograd::compute_requires_grad(t);
    LIGER_CHECK(!learned, kOp, name, "not require a gradient", "one that does");
  };
  check_constant("t_input", t_input);
  check_constant("t_weight", t_weight);
  check_constant("t_bias", t_bias);
  check_constant("token_weight", token_weight);
  Wanted wanted;
  wanted.input = torch::autograd::compute_requires_grad(s_input);
  wanted.weight = torch::autograd::compute_requires_grad(s_weight);
  wanted.bias = torch::autograd::compute_requires_grad(s_bias);
  if (!wanted.any()) {
    static const auto op = core::find_op<decltype(apply<Meta>)>("liger::fused_linear_divergence");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(
        s_input, s_weight, t_input, t_weight, s_bias, t_bias, beta, temperature, s_logits_scale, s_softcap,
        t_logits_scale, t_softcap, mask, reduction, token_weight, memory_budget);
  }
  const Options o =
      parse(kOp, beta, temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, reduction, memory_budget);
  static const auto op = core::find_op<decltype(fwd<Meta>)>("liger::_fused_linear_divergence_fwd");
  Results out;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(
        out.divergence, out.entropy, out.gradients.input, out.gradients.weight, out.gradients.bias, out.stats,
        out.deferred_scale) =
        op.call(
            s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, {}, beta, temperature,
            s_logits_scale, s_softcap, t_logits_scale, t_softcap, reduction, memory_budget, wanted.bits());
  }
  auto save = [](const auto& t) { return core::SavedVariable(t, false); };
  auto edges = torch::autograd::collect_next_edges(s_input, s_weight, s_bias);
  if (o.reduced()) {
    auto node = core::make_node<ReducedNode>();
    node->set_next_edges(std::move(edges));
    node->saved = {
        save(out.gradients.input), save(out.gradients.weight), save(out.gradients.bias), save(out.deferred_scale)};
    torch::autograd::set_history(out.divergence, node);
  } else if (computes_now(o, wanted)) {
    auto node = core::make_node<FrozenHeadNode>();
    node->set_next_edges(std::move(edges));
    node->saved = {save(out.gradients.input)};
    torch::autograd::set_history(out.divergence, node);
  } else {
    auto node = core::make_node<TrainedHeadNode>();
    node->set_next_edges(std::move(edges));
    node->saved = {save(s_input), save(s_weight), save(t_input),      save(t_weight), save(s_bias),
                   save(t_bias),  save(mask),     save(token_weight), save(out.stats)};
    node->beta = beta, node->temperature = temperature;
    node->s_logits_scale = s_logits_scale, node->t_logits_scale = t_logits_scale;
    node->s_softcap = s_softcap, node->t_softcap = t_softcap;
    node->memory_budget = memory_budget, node->wanted = wanted.bits();
    torch::autograd::set_history(out.divergence, node);
  }
  // Only the node may hold the gradients, so that backward can overwrite them.
  out.gradients = {};
  return {out.divergence, out.entropy};
}

// ---- Autocast: casts the arguments that F.linear casts. The divergence is fp32 in any case.

template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> autocast(
    const Tensor& s_input, const Tensor& s_weight, const Tensor& t_input, const Tensor& t_weight,
    const OptionalTensor& s_bias, const OptionalTensor& t_bias, double beta, double temperature, double s_logits_scale,
    Cap s_softcap, double t_logits_scale, Cap t_softcap, const OptionalTensor& mask, c10::string_view reduction,
    const OptionalTensor& token_weight, Budget memory_budget) {
  static const auto op = core::find_op<decltype(apply<Meta>)>("liger::fused_linear_divergence");
  c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  auto cast = [](const Tensor& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  };
  auto cast_bias = [&](const OptionalTensor& t) { return t && t->defined() ? OptionalTensor(cast(*t)) : t; };
  return op.call(
      cast(s_input), cast(s_weight), cast(t_input), cast(t_weight), cast_bias(s_bias), cast_bias(t_bias), beta,
      temperature, s_logits_scale, s_softcap, t_logits_scale, t_softcap, mask, reduction, token_weight, memory_budget);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  const std::string models = "Tensor s_input, Tensor s_weight, Tensor t_input, Tensor t_weight, ";
  const std::string rest = "Tensor? s_bias, Tensor? t_bias, Tensor? mask, Tensor? token_weight, ";
  const std::string options =
      "float beta, float temperature, float s_logits_scale, float? s_softcap, float t_logits_scale, float? t_softcap, ";
  core::define(
      m,
      std::string(kOp) + "(" + models +
          "Tensor? s_bias=None, Tensor? t_bias=None, *, float beta=0.0, float temperature=1.0, "
          "float s_logits_scale=1.0, float? s_softcap=None, float t_logits_scale=1.0, float? t_softcap=None, "
          "Tensor? mask=None, str reduction=\"none\", Tensor? token_weight=None, int? memory_budget=None) "
          "-> (Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_divergence_fwd(" + models + rest + "Tensor? total, " + options +
          "str reduction, int? memory_budget, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  core::define(
      m,
      "_fused_linear_divergence_bwd(Tensor grad, " + models + rest + "Tensor stats, " + options +
          "int? memory_budget, int wanted) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl(kOp, autograd); }
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<autocast<c10::DeviceType::CUDA>>(m, kOp); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { core::implement<autocast<c10::DeviceType::CPU>>(m, kOp); }

}  // namespace liger::ops::fused_linear_divergence
