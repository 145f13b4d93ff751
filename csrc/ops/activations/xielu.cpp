// xielu(x, alpha_p, alpha_n, beta, eps), the activation of Apertus. With p = softplus(alpha_p), s = softplus(alpha_n)
// and c = min(x, eps):
//
//   p x^2 + beta x for x > 0, else (s + beta) (expm1(c) - x) + beta x = s (expm1(c) - x) + beta expm1(c)
//
// x: (...) with at least one dimension, of any strides; alpha_p, alpha_n: one number each, in x's dtype or fp32. The
// result has x's dtype; arithmetic is fp32 with one rounding. Only the inputs are saved. Backward overwrites the
// incoming gradient if nothing else can see it.

#include "core/cpu/math.h"
#include "core/rows/elements.h"
#include "core/operator.h"
#include "kernels/xielu.h"
#include "core/cuda/column_sum.h"

namespace liger::ops::xielu {
namespace {

using at::Tensor;

constexpr const char* kOp = "xielu";
constexpr const char* kBackward = "xielu backward";

struct Numbers {
  const Tensor &alpha_p, &alpha_n;
  double beta, eps;
};

/// Both or none.
struct Gradients {
  Tensor alpha_p, alpha_n;

  explicit operator bool() const { return alpha_p.defined(); }
  void zero() const {
    if (*this) alpha_p.zero_(), alpha_n.zero_();
  }
};

// ---- CPU

template <class C>
C softplus(C alpha) {
  return alpha > 20 ? alpha : core::vector_log1p(std::exp(alpha));
}

template <class C>
struct Constants {
  C p, s, beta, eps;

  static Constants of(const Numbers& numbers) {
    const C p = core::first_number(core::input<C>(numbers.alpha_p)),
            n = core::first_number(core::input<C>(numbers.alpha_n));
    return {softplus(p), softplus(n), C(numbers.beta), C(numbers.eps)};
  }
};

template <class C>
struct Below {
  C gap, rise, gap_slope, rise_slope;
};

/// expm1(c) - v and expm1(c), and their slopes.
inline Below<float> below(float v, float eps) {
  constexpr float kNear = -0.5f;  // above this, a series replaces the exponential
  const float c = v > eps ? eps : v;
  const float small = core::expm1_less_x(c), power = core::vector_exp(c);
  const float rise = c > kNear ? small + c : power - 1, slope = c > kNear ? 1 + rise : power;
  return {c > kNear ? small + (c - v) : rise - v, rise, v > eps ? -1.f : rise, v > eps ? 0.f : slope};
}
inline Below<double> below(double v, double eps) {
  const double rise = std::expm1(v > eps ? eps : v);
  return {rise - v, rise, v > eps ? -1 : rise, v > eps ? 0 : std::exp(v)};
}

// dx may be dy, or null. sums: of the gradients of p and s. k is a copy, which cannot alias dx.
template <class C>
void backward_span(core::Output<C> dx, core::Input<C> dy, core::Input<C> x, Constants<C> k, double* sums, int64_t n) {
  C stages[3][core::kStage];
  for (int64_t first = 0; first < n; first += core::kStage) {
    const int64_t count = std::min(core::kStage, n - first);
    const C *d = core::widen_all(dy + first, stages[0], count), *v = core::widen_all(x + first, stages[1], count);
    C sum_p = 0, sum_n = 0;
#pragma omp simd reduction(+ : sum_p, sum_n)
    for (int64_t i = 0; i < count; ++i) {
      const C gap = below(v[i], k.eps).gap;
      sum_p += v[i] > 0 ? d[i] * v[i] * v[i] : C(0);
      sum_n += v[i] > 0 ? C(0) : d[i] * gap;
    }
    sums[0] += double(sum_p), sums[1] += double(sum_n);
    if (!dx) continue;
    C* out = core::target(dx + first, stages[2]);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const auto low = below(v[i], k.eps);
      out[i] = d[i] * (v[i] > 0 ? 2 * k.p * v[i] + k.beta : k.s * low.gap_slope + k.beta * low.rise_slope);
    }
    core::narrow_all(dx + first, out, count);
  }
}

struct Cpu {
  static void forward(Tensor y, Tensor x, const Numbers& numbers) {
    runtime::count_cpu_call();
    if (x.numel() == 0) return;
    const auto walk = core::walk_elements<2>(kOp, {&y, &x});
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto constants = Constants<C>::of(numbers);
      const auto y_at = core::output<C>(y);
      const auto x_at = core::input<C>(x);
      core::parallel_spans(walk, [&](int64_t row, int64_t first, int64_t n) {
        auto at = [&](size_t tensor) { return walk.offset(tensor, row) + first; };
        core::transform(
            y_at + at(0), n,
            [k = constants](C v) {
              const auto low = below(v, k.eps);
              return v > 0 ? (k.p * v + k.beta) * v : k.s * low.gap + k.beta * low.rise;
            },
            x_at + at(1));
      });
    });
  }

  static void backward(Tensor dx, Tensor dy, Tensor x, const Numbers& numbers, const Gradients& out) {
    runtime::count_cpu_call();
    if (x.numel() == 0) return out.zero();
    Tensor lead = core::lead_of(dx, x);
    const auto walk = core::walk_elements<3>(kBackward, {&lead, &dy, &x});
    const int64_t spans = core::spans_of(walk);
    // One sum for each span: the result does not depend on the number of threads.
    const Tensor sums = at::zeros({walk.rows * spans, 2}, x.options().dtype(at::kDouble));
    double* sums_at = sums.data_ptr<double>();
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto constants = Constants<C>::of(numbers);
      const auto dx_at = core::output<C>(dx);
      const auto dy_at = core::input<C>(dy), x_at = core::input<C>(x);
      core::parallel_spans(walk, [&](int64_t row, int64_t first, int64_t n) {
        auto at = [&](size_t tensor) { return walk.offset(tensor, row) + first; };
        double* sum = sums_at + 2 * (row * spans + first / core::kSpan);
        core::vectorized<C>([&] { backward_span(dx_at + at(0), dy_at + at(1), x_at + at(2), constants, sum, n); });
      });
    });
    if (!out) return;
    const Tensor total = sums.sum(0);
    out.alpha_p.copy_(total[0] * numbers.alpha_p.to(at::kDouble).sigmoid());
    out.alpha_n.copy_(total[1] * numbers.alpha_n.to(at::kDouble).sigmoid());
  }
};

// ---- CUDA

namespace flags = kernels::constants::xielu;

struct Cuda {
  template <class Args>
  static void pass(Args& args, const Tensor& x, const Numbers& numbers) {
    core::pass_parameter(args.alpha_p, args.wide_p, numbers.alpha_p, x);
    core::pass_parameter(args.alpha_n, args.wide_n, numbers.alpha_n, x);
    args.beta = float(numbers.beta), args.eps = float(numbers.eps);
  }

  template <class K>
  static auto point_of(const Tensor& x) {
    return runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(x)));
  }

  static void forward(Tensor y, Tensor x, const Numbers& numbers) {
    using K = kernels::xielu_fwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    const auto walk = core::walk_elements<2>(kOp, {&y, &x});
    K::Args args{
        .y = core::address(y), .x = core::address(x), .y_strides = walk.strides[0], .x_strides = walk.strides[1]};
    pass(args, x, numbers);
    core::launch_tiles<K>(kOp, x.device(), walk, args, point_of<K>(x));
  }

  static void backward(Tensor dx, Tensor dy, Tensor x, const Numbers& numbers, const Gradients& out) {
    using K = kernels::xielu_bwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return out.zero();
    Tensor lead = core::lead_of(dx, x);
    const auto walk = core::walk_elements<3>(kBackward, {&lead, &dy, &x});
    K::Args args{
        .dx = core::address(dx),
        .dy = core::address(dy),
        .x = core::address(x),
        .dx_strides = walk.strides[0],
        .dy_strides = walk.strides[1],
        .x_strides = walk.strides[2],
        .flags = (dx.defined() ? flags::NEEDS_DX : 0) | (out ? flags::NEEDS_DALPHA : 0)};
    pass(args, x, numbers);
    walk.pass(args);
    const auto choice = core::choose<K>(walk.n, args, point_of<K>(x), walk.rows);
    const int64_t tiles = core::tiles_of(choice.config, walk);
    core::launch_with_sums(kBackward, x.device(), choice, tiles, args, {out.alpha_p, out.alpha_n}, /*final_flag=*/0);
  }
};

struct Meta {
  static void forward(const Tensor&, const Tensor&, const Numbers&) {}
  static void backward(const Tensor&, const Tensor&, const Tensor&, const Numbers&, const Gradients&) {}
};

void check(const char* op, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n) {
  core::check_activation(op, "x", x);
  for (const auto& [name, alpha] : {std::pair<const char*, const Tensor&>("alpha_p", alpha_p), {"alpha_n", alpha_n}}) {
    core::check_same_device(op, name, alpha, "x", x);
    core::check_dense(op, name, alpha);
    core::check_parameter_dtype(op, name, alpha, "x", x);
    LIGER_CHECK(alpha.sym_numel() == 1, op, name, "have one element", alpha.sym_sizes());
  }
  LIGER_CHECK(
      alpha_n.scalar_type() == alpha_p.scalar_type(), op, "alpha_n",
      c10::str("have the dtype of alpha_p, ", alpha_p.scalar_type()), alpha_n.scalar_type());
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

struct Backward
    : core::Private<
          Backward, Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double, double),
          core::Overwrites<0>> {
  static constexpr const char* kName = "_xielu_bwd";
  static constexpr const char* kArguments = "dy, x, alpha_p, alpha_n, wanted, beta, eps";

  template <class Device>
  static Three run(
      const Into& into, const Tensor& dy, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, int64_t wanted,
      double beta, double eps) {
    check(kBackward, x, alpha_p, alpha_n);
    core::check_same(kBackward, "dy", dy, "x", x);
    const Tensor dx = core::result_rows(into[0], core::wants(wanted, 0), x);
    const bool of_p = core::wants(wanted, 1), of_n = core::wants(wanted, 2);
    Gradients out;
    if (of_p || of_n) out = {at::empty_like(alpha_p), at::empty_like(alpha_n)};
    Device::backward(dx, dy, x, {alpha_p, alpha_n, beta, eps}, out);
    return {dx, of_p ? out.alpha_p : Tensor(), of_n ? out.alpha_n : Tensor()};
  }
};

// No autocast: like torch's own activations, it computes in the dtype of its input.
struct Xielu : core::Operator<Xielu, Tensor(const Tensor&, const Tensor&, const Tensor&, double, double)> {
  static constexpr const char* kOp = xielu::kOp;
  static constexpr const char* kSchema = schemas::xielu;
  using Edges = core::Positions<0, 1, 2>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>>;
  using Privates = core::Privates<Backward>;
  using Cpu = xielu::Cpu;
  using Cuda = xielu::Cuda;
  using Meta = xielu::Meta;

  template <class Device>
  static Tensor run(bool, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double eps) {
    check(kOp, x, alpha_p, alpha_n);
    Tensor y = core::empty_rows_like(x);
    Device::forward(y, x, {alpha_p, alpha_n, beta, eps});
    return y;
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), alpha_p = node.take(1), alpha_n = node.take(2);
    const auto& [beta, eps] = node.options;
    const bool overwrite = node.needs(0) && node.may_overwrite(dy, x);
    auto [dx, dp, dn] = Backward::call(overwrite, dy, x, alpha_p, alpha_n, node.wanted(), beta, eps);
    return {dx, dp, dn};
  }
};

}  // namespace

LIGER_OPERATOR(Xielu)

}  // namespace liger::ops::xielu
