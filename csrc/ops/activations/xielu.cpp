// xielu(x, alpha_p, alpha_n, beta, eps), the activation of Apertus. With p = softplus(alpha_p), s = softplus(alpha_n)
// and c = min(x, eps):
//
//   p x^2 + beta x for x > 0, else (s + beta) (expm1(c) - x) + beta x = s (expm1(c) - x) + beta expm1(c)
//
// x: (...) with at least one dimension, of any strides; alpha_p, alpha_n: one number each, in x's dtype or fp32. The
// result has x's dtype; arithmetic is fp32 with one rounding. Only the inputs are saved. Backward overwrites the
// incoming gradient if nothing else can see it.

#include "core/column_sum.h"
#include "core/cpu/math.h"
#include "core/elements.h"
#include "core/operator.h"
#include "kernels/xielu.h"

namespace liger::ops::xielu {
namespace {

using at::Tensor;

constexpr const char* kOp = "xielu";
constexpr const char* kBackward = "xielu backward";
/// Bits of `wanted`, besides kWantInput.
constexpr int64_t kWantP = core::kWantWeight, kWantN = core::kWantBias;

struct Numbers {
  const Tensor &alpha_p, &alpha_n;
  double beta, eps;
};

struct Gradients {
  Tensor alpha_p, alpha_n;
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

// dx may be dy, or null. sums: of the gradients of p and s. k is a copy, which cannot alias
// dx.
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
    auto walk = core::walk_elements<2>(kOp, {&y, &x});
    const auto& [to, from] = walk.strides;
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto constants = Constants<C>::of(numbers);
      const auto y_at = core::output<C>(y);
      const auto x_at = core::input<C>(x);
      core::parallel_spans(walk, [&, to = to, from = from](int64_t row, int64_t first, int64_t n) {
        const int64_t inner = walk.inner_rows;
        core::transform(
            y_at + (to.offset(row, inner) + first), n,
            [k = constants](C v) {
              const auto low = below(v, k.eps);
              return v > 0 ? (k.p * v + k.beta) * v : k.s * low.gap + k.beta * low.rise;
            },
            x_at + (from.offset(row, inner) + first));
      });
    });
  }

  static Gradients backward(Tensor dx, Tensor dy, Tensor x, const Numbers& numbers, bool needs_alpha) {
    runtime::count_cpu_call();
    Gradients out;
    if (needs_alpha) out = {at::zeros_like(numbers.alpha_p), at::zeros_like(numbers.alpha_n)};
    if (x.numel() == 0) return out;
    Tensor lead = dx.defined() ? dx : core::empty_rows_like(x);
    auto walk = core::walk_elements<3>(kBackward, {&lead, &dy, &x});
    const auto& [to, grad, from] = walk.strides;
    const int64_t spans = core::spans_of(walk);
    // One sum for each span: the result does not depend on the number of threads.
    const Tensor sums = at::zeros({walk.rows * spans, 2}, x.options().dtype(at::kDouble));
    double* sums_at = sums.data_ptr<double>();
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto constants = Constants<C>::of(numbers);
      const auto dx_at = dx.defined() ? core::output<C>(lead) : core::Output<C>();
      const auto dy_at = core::input<C>(dy), x_at = core::input<C>(x);
      core::parallel_spans(walk, [&, to = to, grad = grad, from = from](int64_t row, int64_t first, int64_t n) {
        const int64_t inner = walk.inner_rows;
        core::vectorized<C>([&] {
          backward_span(
              dx_at + (to.offset(row, inner) + first), dy_at + (grad.offset(row, inner) + first),
              x_at + (from.offset(row, inner) + first), constants, sums_at + 2 * (row * spans + first / core::kSpan),
              n);
        });
      });
    });
    if (!needs_alpha) return out;
    const Tensor total = sums.sum(0);
    out.alpha_p.copy_(total[0] * numbers.alpha_p.to(at::kDouble).sigmoid());
    out.alpha_n.copy_(total[1] * numbers.alpha_n.to(at::kDouble).sigmoid());
    return out;
  }
};

// ---- CUDA

namespace flags = kernels::constants::xielu;

struct Cuda {
  /// The arguments that hold the numbers, in x's dtype and in fp32.
  template <class Args>
  static int32_t pass(Args& args, const Tensor& x, const Numbers& numbers) {
    const bool wide = numbers.alpha_p.scalar_type() != x.scalar_type();
    (wide ? args.wide_p : args.alpha_p) = core::address(numbers.alpha_p);
    (wide ? args.wide_n : args.alpha_n) = core::address(numbers.alpha_n);
    args.beta = float(numbers.beta), args.eps = float(numbers.eps);
    return wide ? flags::WIDE : 0;
  }

  static void forward(Tensor y, Tensor x, const Numbers& numbers) {
    using K = kernels::xielu_fwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    auto walk = core::walk_elements<2>(kOp, {&y, &x});
    const bool aligned = core::aligned16(core::address(y), core::address(x)) && walk.aligned_strides();
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(x)));
    const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
    const auto& [to, from] = walk.strides;
    K::Args args{};
    args.flags = pass(args, x, numbers);
    args.y = core::address(y), args.x = core::address(x);
    args.rows = int32_t(walk.rows), args.n = walk.n, args.inner_rows = walk.kernel_inner_rows();
    args.y_outer = to.outer, args.y_inner = to.inner, args.x_outer = from.outer, args.x_inner = from.inner;
    core::launch<K>(kOp, x.device(), runtime::variant_index<K>(config, point), core::tile_grid(config, walk), args);
  }

  static Gradients backward(Tensor dx, Tensor dy, Tensor x, const Numbers& numbers, bool needs_alpha) {
    using K = kernels::xielu_bwd;
    c10::DeviceGuard guard(x.device());
    Gradients out;
    if (x.numel() == 0) {
      if (needs_alpha) out = {at::zeros_like(numbers.alpha_p), at::zeros_like(numbers.alpha_n)};
      return out;
    }
    if (needs_alpha) out = {at::empty_like(numbers.alpha_p), at::empty_like(numbers.alpha_n)};
    Tensor lead = dx.defined() ? dx : core::empty_rows_like(x);
    auto walk = core::walk_elements<3>(kBackward, {&lead, &dy, &x});
    const bool aligned =
        core::aligned16(core::address(dx), core::address(dy), core::address(x)) && walk.aligned_strides();
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(x)));
    const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
    const int64_t tiles = core::tile_grid(config, walk).x;
    const int64_t programs = core::persistent_programs(x.device(), tiles, config.programs_per_sm);
    Tensor partial;
    if (needs_alpha) partial = at::empty({2, programs, 1}, x.options().dtype(at::kFloat));
    const auto& [to, grad, from] = walk.strides;
    K::Args args{};
    args.flags =
        pass(args, x, numbers) | (dx.defined() ? flags::NEEDS_DX : 0) | (needs_alpha ? flags::NEEDS_DALPHA : 0);
    args.dx = core::address(dx), args.partial = core::address(partial);
    args.dy = core::address(dy), args.x = core::address(x);
    args.rows = int32_t(walk.rows), args.n = walk.n, args.inner_rows = walk.kernel_inner_rows();
    args.dx_outer = to.outer, args.dx_inner = to.inner, args.dy_outer = grad.outer, args.dy_inner = grad.inner;
    args.x_outer = from.outer, args.x_inner = from.inner;
    core::launch<K>(kBackward, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
    if (needs_alpha) core::column_sum(kBackward, partial, out.alpha_p, out.alpha_n);
    return out;
  }
};

struct Meta {
  static void forward(const Tensor&, const Tensor&, const Numbers&) {}
  static Gradients backward(const Tensor&, const Tensor&, const Tensor&, const Numbers& numbers, bool needs_alpha) {
    if (!needs_alpha) return {};
    return {at::empty_like(numbers.alpha_p), at::empty_like(numbers.alpha_n)};
  }
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

// No autocast: like torch's own activations, it computes in the dtype of its input.
struct Xielu : core::Operator<Xielu, Tensor(const Tensor&, const Tensor&, const Tensor&, double, double)> {
  static constexpr const char* kOp = xielu::kOp;
  static constexpr const char* kSchema = schemas::xielu;
  using Edges = core::Positions<0, 1, 2>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>>;
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

  template <class Device>
  static Gradients differentiate(
      const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta,
      double eps, int64_t wanted) {
    check(kBackward, x, alpha_p, alpha_n);
    core::check_same(kBackward, "dy", dy, "x", x);
    auto out = Device::backward(dx, dy, x, {alpha_p, alpha_n, beta, eps}, wanted & (kWantP | kWantN));
    if (!(wanted & kWantP)) out.alpha_p = Tensor();
    if (!(wanted & kWantN)) out.alpha_n = Tensor();
    return out;
  }

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> bwd(
      const Tensor& dy, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, int64_t wanted, double beta,
      double eps) {
    const Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
    auto out = differentiate<Device>(dx, dy, x, alpha_p, alpha_n, beta, eps, wanted);
    return {dx, out.alpha_p, out.alpha_n};
  }

  // Overwrites dy with the gradient.
  template <class Device>
  static std::tuple<Tensor, Tensor> bwd_(
      Tensor& dy, const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, int64_t wanted, double beta,
      double eps) {
    auto out = differentiate<Device>(dy, dy, x, alpha_p, alpha_n, beta, eps, wanted);
    return {out.alpha_p, out.alpha_n};
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_xielu_bwd", "Tensor(a!) dy, Tensor x, Tensor alpha_p, Tensor alpha_n, int wanted, float beta, float eps",
        "(Tensor, Tensor, Tensor)", "(Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_xielu_bwd");
    core::implement<bwd_<Device>>(m, "_xielu_bwd_");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), alpha_p = node.take(1), alpha_n = node.take(2);
    const auto& [beta, eps] = node.options;
    const int64_t wanted = core::wanted_bits(node.needs(0), node.needs(1), node.needs(2));
    if (node.needs(0) && node.may_overwrite(dy, x)) {
      static const auto op = core::find_op<decltype(bwd_<Meta>)>("_xielu_bwd_");
      auto [dp, dn] = op.call(dy, x, alpha_p, alpha_n, wanted, beta, eps);
      return {dy, dp, dn};
    }
    static const auto op = core::find_op<decltype(bwd<Meta>)>("_xielu_bwd");
    auto [dx, dp, dn] = op.call(dy, x, alpha_p, alpha_n, wanted, beta, eps);
    return {dx, dp, dn};
  }
};

}  // namespace

LIGER_OPERATOR(Xielu)

}  // namespace liger::ops::xielu
