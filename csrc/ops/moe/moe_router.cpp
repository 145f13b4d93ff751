// moe_router(logits, top_k, ...): the experts of each token and their weights, and sums over all tokens for
// load-balancing and z losses.
//
// logits: (..., n) of any strides. Results are fp32 (fp64 for fp64 logits). Saves the logits and the chosen indices;
// backward recomputes the scores. score "sqrtsoftplus" is rounded to the logits' dtype after softplus and after sqrt,
// as in DeepSeek-V4, because the choice depends on it. experts: (..., top_k), chosen beforehand.

#include "core/cuda/column_sum.h"
#include "core/cpu/loops.h"
#include "core/operator.h"
#include "core/values.h"
#include "kernels/moe_router.h"

namespace liger::ops::moe_router {
namespace {

namespace flags = kernels::constants::moe_router;

using at::Tensor;

constexpr const char* kOp = "moe_router";
constexpr const char* kBackward = "moe_router backward";
constexpr double kLeast = 1e-20;  // keeps a sum of scores that are all zero from dividing zero

enum class Score { softmax, sigmoid, sqrtsoftplus };

/// How weights follow from logits, for forward and backward.
struct Weighing {
  Score score;
  bool normalize;
  double scale;
};

struct Choice {
  int64_t top_k, groups, top_groups;
};

struct Results {
  Tensor weights, index, tokens, scores, z;  // the last three have no elements if they are not wanted
};

/// Undefined gradients are zero.
struct Upstream {
  Tensor weights, scores, z;
};

/// Contiguous rows; bias and token_weight in the compute type, and the experts that are given, or undefined.
struct Inputs {
  Tensor logits, bias, token_weight, given;

  int64_t experts() const { return logits.size(-1); }
  int64_t rows() const { return c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1)); }
};

// ---- CPU

template <class C>
struct Row {
  std::vector<C> scores, soft;
  C lse = 0;

  /// storage: of the logits, to which roots of softplus are rounded.
  void read(const C* x, int64_t n, Score score, core::Storage storage) {
    scores.resize(n), soft.resize(n);
    C peak = -std::numeric_limits<C>::infinity();
    double total = 0;
    for (int64_t j = 0; j < n; ++j) peak = x[j] > peak || x[j] != x[j] ? x[j] : peak;
    for (int64_t j = 0; j < n; ++j) total += soft[j] = std::exp(x[j] - peak);
    for (int64_t j = 0; j < n; ++j) soft[j] = C(soft[j] / total);
    lse = C(peak + std::log(total));
    for (int64_t j = 0; j < n; ++j) {
      const C v = x[j];
      // From 20 on, softplus is the identity, as in PyTorch.
      scores[j] = score == Score::softmax ? soft[j]
          : score == Score::sigmoid       ? 1 / (1 + std::exp(-v))
          : v > 20                        ? v
                                          : std::log1p(std::exp(v));
    }
    if (score != Score::sqrtsoftplus) return;
    core::round_all(storage, scores.data(), n);
    for (C& s : scores) s = std::sqrt(s);
    core::round_all(storage, scores.data(), n);
  }

  /// The derivative of sqrt(softplus(x)), of which far below 0 the logarithm has the slope 1 / 2.
  static C root_slope(C x, C score) {
    return x < -40 || score == 0 ? score / 2 : 1 / ((1 + std::exp(-x)) * (2 * score));
  }
};

/// The first of the largest values among those that are eligible.
template <class C>
int64_t first_of_largest(const std::vector<C>& by, const std::vector<char>& eligible) {
  int64_t best = -1;
  for (int64_t j = 0; j < int64_t(by.size()); ++j) {
    if (eligible[j] && (best < 0 || by[j] > by[best])) best = j;
  }
  return best;
}

template <class C>
std::vector<char> within_best_groups(const std::vector<C>& by, const Choice& o) {
  const int64_t n = by.size(), size = n / o.groups;
  std::vector<char> eligible(n, o.groups == 1), open(o.groups, 1);
  if (o.groups == 1) return eligible;
  std::vector<C> best(o.groups);
  for (int64_t g = 0; g < o.groups; ++g) {
    std::vector<C> own(by.begin() + g * size, by.begin() + (g + 1) * size);
    std::partial_sort(own.begin(), own.begin() + std::min<int64_t>(2, size), own.end(), std::greater<C>());
    best[g] = own[0] + (size > 1 ? own[1] : C(0));
  }
  for (int64_t k = 0; k < o.top_groups; ++k) {
    const int64_t g = first_of_largest(best, open);
    open[g] = 0;
    std::fill_n(eligible.begin() + g * size, size, 1);
  }
  return eligible;
}

struct Cpu {
  static void forward(const Inputs& in, const Weighing& w, const Choice& o, Results& out) {
    runtime::count_cpu_call();
    const int64_t rows = in.rows(), n = in.experts();
    const bool statistics = out.z.numel() > 0;
    core::dispatch_compute(in.logits.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto logits = core::input<C>(in.logits);
      const C *bias = core::const_data_or_null<C>(in.bias), *counts = core::const_data_or_null<C>(in.token_weight);
      const int64_t* given = core::const_data_or_null<int64_t>(in.given);
      C* weights = out.weights.data_ptr<C>();
      int64_t* index = out.index.data_ptr<int64_t>();
      const int64_t ranges = core::cpu_sum_ranges(rows, n);
      core::PartialColumnSums sums(statistics, ranges, 2 * n + 1, out.weights.options());
      core::parallel_ranges(rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        Row<C> r;
        std::vector<C> by(n), stage = core::make_stage<C>(logits.storage, n);
        std::vector<double> sum(statistics ? 2 * n + 1 : 0);
        for (int64_t row = begin; row < end; ++row) {
          const C* x = core::widen_all(logits + row * n, stage.data(), n);
          r.read(x, n, w.score, logits.storage);
          for (int64_t j = 0; j < n; ++j) {
            // Logits have the order of their scores, without ties from rounding.
            const bool by_logits = !bias && o.groups == 1 && w.score != Score::sqrtsoftplus;
            const C v = by_logits ? x[j] : r.scores[j] + (bias ? bias[j] : C(0));
            by[j] = v == v ? v : std::numeric_limits<C>::infinity();
          }
          auto eligible = within_best_groups(by, o);
          C* weight = weights + row * o.top_k;
          int64_t* chosen = index + row * o.top_k;
          C total = 0;
          for (int64_t k = 0; k < o.top_k; ++k) {
            chosen[k] = given ? given[row * o.top_k + k] : first_of_largest(by, eligible);
            eligible[chosen[k]] = 0;
            total += weight[k] = r.scores[chosen[k]];
          }
          const C factor = C(w.scale) / (w.normalize ? total + C(kLeast) : C(1));
          for (int64_t k = 0; k < o.top_k; ++k) weight[k] *= factor;
          const C count = counts ? counts[row] : C(1);
          if (!statistics || count == 0) continue;
          for (int64_t k = 0; k < o.top_k; ++k) sum[chosen[k]] += count;
          for (int64_t j = 0; j < n; ++j) sum[n + j] += count * r.scores[j];
          sum[2 * n] += count * r.lse * r.lse;
        }
        std::copy(sum.begin(), sum.end(), sums.template of<C>(range));
      });
      if (!statistics) return;
      const Tensor all = sums.sum(out.z.scalar_type());
      out.tokens.copy_(all.narrow(0, 0, n));
      out.scores.copy_(all.narrow(0, n, n));
      out.z.copy_(all[2 * n]);
    });
  }

  static void backward(Tensor& dlogits, const Upstream& up, const Inputs& in, const Tensor& index, const Weighing& w) {
    runtime::count_cpu_call();
    const int64_t rows = in.rows(), n = in.experts(), top_k = index.size(-1);
    core::dispatch_compute(in.logits.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto logits = core::input<C>(in.logits);
      const auto dx = core::output<C>(dlogits);
      const C *g = core::const_data_or_null<C>(up.weights), *h = core::const_data_or_null<C>(up.scores);
      const C *z = core::const_data_or_null<C>(up.z), *counts = core::const_data_or_null<C>(in.token_weight);
      const int64_t* all = index.const_data_ptr<int64_t>();
      core::parallel_ranges(rows, core::cpu_ranges(rows, n), [&](int64_t, int64_t begin, int64_t end) {
        Row<C> r;
        std::vector<C> d(n), stage = core::make_stage<C>(logits.storage, n);
        for (int64_t row = begin; row < end; ++row) {
          const C* x = core::widen_all(logits + row * n, stage.data(), n);
          r.read(x, n, w.score, logits.storage);
          std::fill(d.begin(), d.end(), C(0));
          const int64_t* chosen = all + row * top_k;
          C total = C(kLeast), dot = 0;
          for (int64_t k = 0; g && k < top_k; ++k) {
            total += r.scores[chosen[k]], dot += g[row * top_k + k] * r.scores[chosen[k]];
          }
          for (int64_t k = 0; g && k < top_k; ++k) {
            const C own = g[row * top_k + k];
            d[chosen[k]] += C(w.scale) * (w.normalize ? (own - dot / total) / total : own);
          }
          const C count = counts ? counts[row] : C(1);
          for (int64_t j = 0; h && count != 0 && j < n; ++j) d[j] += count * h[j];
          C mean = 0;
          for (int64_t j = 0; j < n; ++j) mean += d[j] * r.scores[j];
          for (int64_t j = 0; j < n; ++j) {
            const C at = x[j], score = r.scores[j];
            C v = 0;
            if (g || (h && count != 0)) {
              // The slope of a sigmoid, without the cancellation of 1 - score.
              v = w.score == Score::softmax   ? score * (d[j] - mean)
                  : w.score == Score::sigmoid ? score * (d[j] * (1 / (1 + std::exp(at))))
                                              : d[j] * Row<C>::root_slope(at, score);
            }
            if (z && count != 0) v += 2 * count * *z * r.lse * r.soft[j];
            d[j] = v;
          }
          core::store_all(dx + row * n, d.data(), n);
        }
      });
    });
  }
};

// ---- CUDA

int32_t bits(bool condition, int32_t flag) { return condition ? flag : 0; }

int32_t weighing_flags(const Inputs& in, const Weighing& w) {
  return bits(w.score == Score::sigmoid, flags::SIGMOID) | bits(w.score == Score::sqrtsoftplus, flags::SQRTSOFTPLUS) |
      bits(w.normalize, flags::NORMALIZE) | bits(in.token_weight.defined(), flags::HAS_TOKEN_WEIGHT);
}

struct Cuda {
  static void forward(const Inputs& in, const Weighing& w, const Choice& o, Results& out) {
    using K = kernels::moe_router_fwd;
    c10::DeviceGuard guard(in.logits.device());
    const int64_t rows = in.rows(), n = in.experts();
    const bool statistics = out.z.numel() > 0;
    if (rows == 0) {
      for (const Tensor& t : {out.tokens, out.scores, out.z}) t.zero_();
      return;
    }
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(in.logits)), o.groups > 1 ? 1 : 0);
    K::Args args{
        .weights = core::address(out.weights),
        .index = core::address(out.index),
        .logits = core::address(in.logits),
        .bias = core::address(in.bias),
        .token_weight = core::address(in.token_weight),
        .given = core::address(in.given),
        .rows = int32_t(rows),
        .n = int32_t(n),
        .top_k = int32_t(o.top_k),
        .groups = int32_t(o.groups),
        .group_size = int32_t(n / o.groups),
        .top_groups = int32_t(o.top_groups),
        .scale = float(w.scale),
        .least = float(kLeast),
        .flags = weighing_flags(in, w) | bits(statistics, flags::STATISTICS) |
            bits(in.bias.defined(), flags::HAS_SCORE_BIAS) | bits(in.given.defined(), flags::HAS_EXPERTS) |
            bits(!in.bias.defined() && o.groups == 1 && w.score != Score::sqrtsoftplus, flags::BY_LOGITS)};
    const auto choice = core::choose<K>(n, args, point);
    const int64_t programs = core::persistent_programs(
        in.logits.device(), core::programs_for(rows, choice.config.ROWS), std::max(1, choice.config.programs_per_sm));
    Tensor counts, sums, squares;
    if (statistics) {
      counts = at::empty({1, programs, n}, out.z.options());
      sums = at::empty({1, programs, n}, out.z.options());
      squares = at::empty({1, programs, 1}, out.z.options());
    }
    args.tokens = core::address(counts);
    args.sums = core::address(sums);
    args.squares = core::address(squares);
    core::launch(kOp, in.logits.device(), choice, {uint32_t(programs)}, args);
    if (!statistics) return;
    core::column_sum(kOp, counts, out.tokens);
    core::column_sum(kOp, sums, out.scores);
    core::column_sum(kOp, squares, out.z.view({1}));
  }

  static void backward(Tensor& dlogits, const Upstream& up, const Inputs& in, const Tensor& index, const Weighing& w) {
    using K = kernels::moe_router_bwd;
    c10::DeviceGuard guard(in.logits.device());
    const int64_t rows = in.rows(), n = in.experts();
    if (rows == 0) return;
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(in.logits)));
    const K::Args args{
        .dlogits = core::address(dlogits),
        .grad = core::address(up.weights),
        .grad_scores = core::address(up.scores),
        .grad_z = core::address(up.z),
        .logits = core::address(in.logits),
        .index = core::address(index),
        .token_weight = core::address(in.token_weight),
        .rows = int32_t(rows),
        .n = int32_t(n),
        .top_k = int32_t(index.size(-1)),
        .scale = float(w.scale),
        .least = float(kLeast),
        .flags = weighing_flags(in, w) | bits(up.weights.defined(), flags::OF_WEIGHTS) |
            bits(up.scores.defined(), flags::OF_SCORES) | bits(up.z.defined(), flags::OF_Z)};
    const auto choice = core::choose<K>(n, args, point);
    core::launch(kBackward, in.logits.device(), choice, {core::programs_for(rows, choice.config.ROWS)}, args);
  }
};

struct Meta {
  static void forward(const Inputs&, const Weighing&, const Choice&, const Results&) {}
  static void backward(const Tensor&, const Upstream&, const Inputs&, const Tensor&, const Weighing&) {}
};

// ---- The operator

Weighing weighing(std::string_view score, bool normalize, double scale) {
  const bool sigmoid = score == "sigmoid", softplus = score == "sqrtsoftplus";
  LIGER_CHECK(
      sigmoid || softplus || score == "softmax", kOp, "score", "be 'softmax', 'sigmoid' or 'sqrtsoftplus'", "'", score,
      "'");
  return {sigmoid ? Score::sigmoid : softplus ? Score::sqrtsoftplus : Score::softmax, normalize, scale};
}

/// t, contiguous and in the compute type, or undefined.
Tensor prepared(
    const char* op, const char* name, const OptionalTensor& t, const Tensor& logits, c10::SymIntArrayRef sizes) {
  if (!t || !t->defined()) return {};
  core::check_same_device(op, name, *t, "logits", logits);
  core::check_dense(op, name, *t);
  LIGER_CHECK(at::isFloatingType(t->scalar_type()), op, name, "be floating point", t->scalar_type());
  LIGER_CHECK(t->sym_sizes().equals(sizes), op, name, c10::str("have shape ", sizes), t->sym_sizes());
  return t->to(core::compute_type(logits)).contiguous();
}

/// Checks the tensors that forward and backward share.
Inputs inputs_of(const char* op, const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& token_weight) {
  core::check_activation(op, "logits", logits);
  const auto sizes = logits.sym_sizes(), rows = sizes.slice(0, logits.dim() - 1), experts = sizes.slice(rows.size());
  LIGER_CHECK(
      experts[0] <= flags::MOST_EXPERTS, op, "logits", c10::str("have at most ", int(flags::MOST_EXPERTS), " experts"),
      experts[0]);
  const Tensor given_bias = prepared(op, "bias", bias, logits, experts);
  return {logits.contiguous(), given_bias, prepared(op, "token_weight", token_weight, logits, rows), {}};
}

struct Backward : core::Private<
                      Backward,
                      Tensor(
                          const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                          const Tensor&, const OptionalTensor&, c10::string_view, bool, double)> {
  static constexpr const char* kName = "_moe_router_bwd";
  static constexpr const char* kArguments =
      "grad, grad_scores, grad_z, logits, index, token_weight, score, normalize, scale";

  template <class Device>
  static Tensor run(
      const OptionalTensor& grad, const OptionalTensor& grad_scores, const OptionalTensor& grad_z, const Tensor& logits,
      const Tensor& index, const OptionalTensor& token_weight, std::string_view score, bool normalize, double scale) {
    const Inputs in = inputs_of(kBackward, logits, std::nullopt, token_weight);
    const auto experts = logits.sym_sizes().slice(logits.dim() - 1);
    const Upstream up{
        prepared(kBackward, "the weights' gradient", grad, logits, index.sym_sizes()),
        prepared(kBackward, "the scores' gradient", grad_scores, logits, experts),
        prepared(kBackward, "the gradient of z", grad_z, logits, {})};
    Tensor dlogits = at::empty_symint(logits.sym_sizes(), logits.options());
    Device::backward(dlogits, up, in, index.contiguous(), weighing(score, normalize, scale));
    return dlogits;
  }
};

using AllResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// No autocast: results are fp32 for logits of any dtype.
struct MoeRouter : core::Operator<
                       MoeRouter,
                       AllResults(
                           const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&, c10::string_view,
                           const OptionalTensor&, bool, double, int64_t, int64_t, bool)> {
  static constexpr const char* kOp = moe_router::kOp;
  static constexpr const char* kSchema = schemas::moe_router;
  using Edges = core::Positions<0>;
  using Constants = core::Positions<2, 3>;
  using Privates = core::Privates<Backward>;
  using Cpu = moe_router::Cpu;
  using Cuda = moe_router::Cuda;
  using Meta = moe_router::Meta;

  template <class Device>
  static AllResults run(
      bool, const Tensor& logits, int64_t top_k, const OptionalTensor& bias, const OptionalTensor& token_weight,
      std::string_view score, const OptionalTensor& experts, bool normalize, double scale, int64_t groups,
      int64_t top_groups, bool statistics) {
    Inputs in = inputs_of(kOp, logits, bias, token_weight);
    const Weighing w = weighing(score, normalize, scale);
    const auto n = logits.sym_sizes().back();
    LIGER_CHECK(groups >= 1 && n % groups == 0, kOp, "groups", c10::str("divide the ", n, " experts"), groups);
    LIGER_CHECK(
        top_groups >= 1 && top_groups <= groups, kOp, "top_groups", c10::str("lie in [1, ", groups, "]"), top_groups);
    const auto open = n / groups * top_groups;
    LIGER_CHECK(
        top_k >= 1 && top_k <= flags::MOST_CHOICES && open >= top_k, kOp, "top_k",
        c10::str("lie in [1, ", open.min(int64_t(flags::MOST_CHOICES)), "]"), top_k);
    c10::SymDimVector chosen(logits.sym_sizes().begin(), logits.sym_sizes().end());
    chosen.back() = top_k;
    if (experts && experts->defined()) {
      core::check_same_device(kOp, "experts", *experts, "logits", logits);
      core::check_integers(kOp, "experts", *experts);
      LIGER_CHECK(
          experts->sym_sizes().equals(chosen), kOp, "experts", c10::str("have shape ", c10::SymIntArrayRef(chosen)),
          experts->sym_sizes());
      LIGER_CHECK(!in.bias.defined(), kOp, "bias", "be None, because experts are given", "a tensor");
      LIGER_CHECK(groups == 1, kOp, "groups", "be 1, because experts are given", groups);
      if constexpr (!std::is_same_v<Device, Meta>) core::check_range(kOp, "experts", *experts, 0, logits.size(-1));
      in.given = experts->to(at::kLong).contiguous();
    }
    const auto options = logits.options().dtype(core::compute_type(logits));
    const c10::SymInt count = statistics ? n : c10::SymInt(0);
    Results out{
        at::empty_symint(chosen, options), at::empty_symint(chosen, options.dtype(at::kLong)),
        at::empty_symint({count}, options), at::empty_symint({count}, options),
        statistics ? at::empty({}, options) : at::empty({0}, options)};
    Device::forward(in, w, {top_k, groups, top_groups}, out);
    return {out.weights, out.index, out.tokens, out.scores, out.z};
  }

  struct Node : core::BackwardNode<Node, 3> {  // logits, index, token_weight
    Options options;

    auto state() { return std::tie(options); }
    std::string name() const override { return kOp; }

    template <class... Rest>
    void record(
        const AllResults& out, const Tensor& logits, int64_t, const OptionalTensor&, const OptionalTensor& token_weight,
        const Rest&...) {
      const auto& [weights, index, tokens, scores, z] = out;
      save(logits, index, token_weight);
      connect(weights);
      if (std::get<6>(options)) connect(scores, z);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      grads.resize(3);
      if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return {Tensor()};
      Tensor logits = take(0), index = take(1), token_weight = take(2);
      const auto& [top_k, score, normalize, scale, groups, top_groups, statistics] = options;
      return {Backward::call(grads[0], grads[1], grads[2], logits, index, token_weight, score, normalize, scale)};
    }
  };
};

}  // namespace

LIGER_OPERATOR(MoeRouter)

}  // namespace liger::ops::moe_router
