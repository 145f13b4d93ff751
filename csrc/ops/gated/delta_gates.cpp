// delta_gates(a, b, a_log, dt_bias, lower_bound, beta_scale) -> g, beta: the decay and the step of the delta rule.
//
//   g = -exp(a_log) * softplus(a + dt_bias), or lower_bound * sigmoid(exp(a_log) * (a + dt_bias))
//   beta = beta_scale * sigmoid(b)
//
// b: (..., n); a: the same shape, or (..., n, d) for a decay per channel; of one dtype. a_log: (n), dt_bias: (n) or (n,
// d), in a's dtype or fp32. g is fp32 (fp64 for fp64), beta has b's dtype. Arithmetic is fp32 with one rounding. Rows
// may be strided; other layouts are copied. Saves the inputs.

#include "core/cuda/column_sum.h"
#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "core/cuda/launch.h"
#include "core/operator.h"
#include "core/rows/rows.h"
#include "kernels/delta_gates.h"

namespace liger::ops::delta_gates {
namespace {

using at::Tensor;
using core::value_or_undefined;

constexpr const char* kOp = "delta_gates";
constexpr const char* kBackward = "delta_gates backward";

/// t: (..., columns of the last `dims` dimensions), as a matrix with adjacent columns.
Tensor matrix(const Tensor& t, int64_t dims) {
  if (!t.defined()) return t;
  const int64_t columns = c10::multiply_integers(t.sizes().slice(t.dim() - dims));
  const Tensor rows = t.reshape({columns ? t.numel() / columns : 0, columns});
  return rows.stride(1) == 1 || columns == 1 ? rows : rows.contiguous();
}

struct Inputs {
  Tensor a, b;  // matrices with adjacent columns
  Tensor a_log, dt_bias;  // contiguous; dt_bias may be undefined
  std::optional<double> bound;
  double scale;

  int64_t rows() const { return a.size(0); }
  int64_t columns() const { return a.size(1); }
  int64_t heads() const { return b.size(1); }
  int64_t channels() const { return columns() / heads(); }
};

struct Gradients {
  Tensor da, db;  // contiguous; undefined unless requested
  Tensor rate, bias;  // of a_log and dt_bias, for every column of a; undefined unless requested
};

// ---- CPU

template <class C>
C softplus(C u) {
  return (u < 0 ? C(0) : u) + core::vector_log1p(core::vector_exp(-std::fabs(u)));
}

template <class C>
void decay_row(C* g, const C* a, const C* rate, const C* bias, const C* bound, int64_t n) {
  const C lowest = bound ? *bound : C(0);
  if (bound) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) g[i] = lowest * core::vector_sigmoid(rate[i] * (a[i] + bias[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) g[i] = -rate[i] * softplus(a[i] + bias[i]);
  }
}

/// dg becomes the gradient of a; `of_rate` and `of_bias` are sums.
template <class C>
void decay_gradient_row(
    C* dg, C* of_rate, C* of_bias, const C* a, const C* rate, const C* bias, const C* bound, int64_t n) {
  const C lowest = bound ? *bound : C(0);
  if (bound) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const C u = a[i] + bias[i], du = dg[i] * (lowest * rate[i] * core::vector_sigmoid_and_slope(rate[i] * u).slope);
      of_rate[i] += du * u, of_bias[i] += du, dg[i] = du;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const C u = a[i] + bias[i], d = -dg[i] * rate[i], du = d * core::vector_sigmoid_and_slope(u).value;
      of_rate[i] += d * softplus(u), of_bias[i] += du, dg[i] = du;
    }
  }
}

struct Cpu {
  /// exp(a_log) and dt_bias for every column.
  static std::pair<Tensor, Tensor> columns_of(const Inputs& in) {
    const auto type = core::compute_type(in.a);
    const Tensor rate = in.a_log.to(type).exp().repeat_interleave(in.channels());
    return {rate, in.dt_bias.defined() ? in.dt_bias.to(type).view(-1) : at::zeros_like(rate)};
  }

  static void forward(const Tensor& g, const Tensor& beta, const Inputs& in) {
    const auto [rates, biases] = columns_of(in);
    const int64_t n = in.columns(), heads = in.heads();
    core::dispatch_compute(in.a.scalar_type(), [&, rates = rates, biases = biases](auto c) {
      using C = decltype(c);
      const C *rate = rates.template const_data_ptr<C>(), *bias = biases.template const_data_ptr<C>();
      const C bound = C(in.bound.value_or(0)), *lowest = in.bound ? &bound : nullptr;
      C* g_at = g.data_ptr<C>();
      const auto beta_at = core::output<C>(beta);
      const auto a_at = core::input<C>(in.a), b_at = core::input<C>(in.b);
      core::parallel_ranges(in.rows(), core::cpu_ranges(in.rows(), n), [&](int64_t, int64_t begin, int64_t end) {
        std::vector<C> stage = core::make_stage<C>(a_at.storage, n);
        for (int64_t row = begin; row < end; ++row) {
          core::vectorized<C>([&] {
            const C* a = core::widen_all(a_at + row * in.a.stride(0), stage.data(), n);
            decay_row(g_at + row * n, a, rate, bias, lowest, n);
          });
          core::transform(
              beta_at + row * heads, heads, [scale = C(in.scale)](C b) { return scale * core::vector_sigmoid(b); },
              b_at + row * in.b.stride(0));
        }
      });
    });
  }

  /// dg, dbeta: matrices with adjacent columns; undefined if nothing needs them.
  static void backward(const Gradients& out, const Tensor& dg, const Tensor& dbeta, const Inputs& in) {
    const auto [rates, biases] = columns_of(in);
    const int64_t n = in.columns(), heads = in.heads(), rows = in.rows();
    const bool sums = out.rate.defined() || out.bias.defined(), of_a = sums || out.da.defined();
    core::dispatch_compute(in.a.scalar_type(), [&, rates = rates, biases = biases](auto c) {
      using C = decltype(c);
      const C *rate = rates.template const_data_ptr<C>(), *bias = biases.template const_data_ptr<C>();
      const C bound = C(in.bound.value_or(0)), *lowest = in.bound ? &bound : nullptr;
      const auto da_at = core::output<C>(out.da), db_at = core::output<C>(out.db);
      const auto a_at = core::input<C>(in.a), b_at = core::input<C>(in.b), dbeta_at = core::input<C>(dbeta);
      const C* dg_at = of_a ? dg.const_data_ptr<C>() : nullptr;
      const int64_t ranges = sums ? core::cpu_sum_ranges(rows, n) : core::cpu_ranges(rows, n);
      core::PartialColumnSums of_rate(of_a, ranges, n, rates.options()), of_bias(of_a, ranges, n, rates.options());
      core::parallel_ranges(rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        std::vector<C> stage = core::make_stage<C>(a_at.storage, n), gradient(n);
        for (int64_t row = begin; row < end; ++row) {
          if (of_a) {
            core::vectorized<C>([&] {
              const C* a = core::widen_all(a_at + row * in.a.stride(0), stage.data(), n);
              std::copy_n(dg_at + row * dg.stride(0), n, gradient.data());
              decay_gradient_row(
                  gradient.data(), of_rate.template of<C>(range), of_bias.template of<C>(range), a, rate, bias, lowest,
                  n);
              if (da_at) core::store_all(da_at + row * n, gradient.data(), n);
            });
          }
          if (!db_at) continue;
          core::transform(
              db_at + row * heads, heads,
              [scale = C(in.scale)](C d, C b) { return d * (scale * core::vector_sigmoid_and_slope(b).slope); },
              dbeta_at + row * dbeta.stride(0), b_at + row * in.b.stride(0));
        }
      });
      if (out.rate.defined()) out.rate.copy_(of_rate.sum(out.rate.scalar_type()));
      if (out.bias.defined()) out.bias.copy_(of_bias.sum(out.bias.scalar_type()));
    });
  }

  static constexpr bool kComputes = true;
};

// ---- CUDA

namespace flags = kernels::constants::delta_gates;

struct Cuda {
  static constexpr bool kComputes = true;

  template <class Args>
  static void pass(Args& args, const Inputs& in) {
    args.a = core::address(in.a), args.b = core::address(in.b);
    args.a_log = core::address(in.a_log), args.dt_bias = core::address(in.dt_bias);
    args.rows = int32_t(in.rows()), args.n = int32_t(in.columns()), args.channels = int32_t(in.channels());
    args.a_row = in.a.stride(0), args.b_row = in.b.stride(0);
    args.lower_bound = float(in.bound.value_or(0)), args.beta_scale = float(in.scale);
    args.flags |= (in.dt_bias.defined() ? flags::HAS_BIAS : 0) | (in.bound ? flags::HAS_BOUND : 0);
  }

  template <class K>
  static auto point_of(const Inputs& in) {
    return runtime::point_of<K>(K::dtype(core::dtype_of(in.a), core::dtype_of(in.a_log)));
  }

  /// Programs for shares of `rows` rows, for every block of columns.
  static uint32_t programs(const char* op, const Inputs& in, int64_t rows, int64_t columns) {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    LIGER_CHECK(
        in.rows() + rows <= kMax && in.columns() + columns <= kMax, op, "a", "have fewer than 2^31 rows and columns",
        in.a.sizes());
    const int64_t count = int64_t(core::programs_for(in.rows(), rows)) * core::programs_for(in.columns(), columns);
    LIGER_CHECK(count <= kMax, op, "a", "have fewer than 2^31 tiles", in.a.sizes());
    return uint32_t(count);
  }

  static void forward(const Tensor& g, const Tensor& beta, const Inputs& in) {
    using K = kernels::delta_gates_fwd;
    c10::DeviceGuard guard(in.a.device());
    K::Args args{.g = core::address(g), .beta = core::address(beta)};
    pass(args, in);
    const auto choice = core::choose<K>(in.columns(), args, point_of<K>(in));
    const auto& config = choice.config;
    const uint32_t count = programs(kOp, in, int64_t(config.BLOCK_M) * config.UNROLL, config.BLOCK_N);
    core::launch(kOp, in.a.device(), choice, {count}, args);
  }

  static void backward(const Gradients& out, const Tensor& dg, const Tensor& dbeta, const Inputs& in) {
    using K = kernels::delta_gates_bwd;
    c10::DeviceGuard guard(in.a.device());
    const bool sums = out.rate.defined() || out.bias.defined();
    K::Args args{
        .da = core::address(out.da),
        .db = core::address(out.db),
        .dg = core::address(dg),
        .dbeta = core::address(dbeta),
        .dg_row = dg.defined() ? dg.stride(0) : 0,
        .dbeta_row = dbeta.defined() ? dbeta.stride(0) : 0,
        .flags = (out.da.defined() ? flags::NEEDS_DA : 0) | (out.db.defined() ? flags::NEEDS_DB : 0) |
            (sums ? flags::NEEDS_SUMS : 0)};
    pass(args, in);
    const auto choice = core::choose<K>(in.columns(), args, point_of<K>(in));
    const auto& config = choice.config;
    const int64_t rows = int64_t(config.BLOCK_M) * config.UNROLL * config.STEPS;
    const uint32_t count = programs(kBackward, in, rows, config.BLOCK_N);
    const int64_t shares = core::programs_for(in.rows(), rows);
    Tensor partial;
    if (sums) partial = at::empty({2, shares, in.columns()}, in.a.options().dtype(at::kFloat));
    args.partial = core::address(partial);
    core::launch(kBackward, in.a.device(), choice, {count}, args);
    // Each alone: their dtypes differ where a head has channels.
    if (out.rate.defined()) core::column_sum(kBackward, partial, out.rate);
    if (out.bias.defined()) core::column_sum(kBackward, partial, {}, out.bias);
  }
};

struct Meta {
  static constexpr bool kComputes = false;
};

void check(
    const char* op, const Tensor& a, const Tensor& b, const Tensor& a_log, const Tensor& dt_bias,
    std::optional<double> lower_bound) {
  LIGER_CHECK(!lower_bound || std::isfinite(*lower_bound), op, "lower_bound", "be finite", *lower_bound);
  core::check_activation(op, "a", a);
  core::check_same_device(op, "b", b, "a", a);
  core::check_dense(op, "b", b);
  LIGER_CHECK(
      b.scalar_type() == a.scalar_type(), op, "b", c10::str("have the dtype of a, ", a.scalar_type()), b.scalar_type());
  const int64_t channels = a.dim() - b.dim();
  LIGER_CHECK(
      (channels == 0 || channels == 1) && b.dim() > 0 && a.sym_sizes().slice(0, b.dim()).equals(b.sym_sizes()), op, "b",
      c10::str("have the shape of a, ", a.sym_sizes(), ", or that without its last dimension"), b.sym_sizes());
  core::check_column_parameter(op, "a_log", a_log, b, "b");
  if (!dt_bias.defined()) return;
  core::check_same_device(op, "dt_bias", dt_bias, "a", a);
  core::check_dense(op, "dt_bias", dt_bias);
  LIGER_CHECK(
      dt_bias.scalar_type() == a_log.scalar_type(), op, "dt_bias",
      c10::str("have the dtype of a_log, ", a_log.scalar_type()), dt_bias.scalar_type());
  const auto columns = a.sym_sizes().slice(b.dim() - 1);
  LIGER_CHECK(
      dt_bias.sym_sizes().equals(columns), op, "dt_bias", c10::str("have shape ", columns), dt_bias.sym_sizes());
}

Inputs inputs_of(
    const Tensor& a, const Tensor& b, const Tensor& a_log, const Tensor& dt_bias, std::optional<double> bound,
    double scale) {
  return {
      matrix(a, a.dim() - b.dim() + 1),
      matrix(b, 1),
      a_log.contiguous(),
      dt_bias.defined() ? dt_bias.contiguous() : dt_bias,
      bound,
      scale};
}

Tensor empty(const Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(like.sym_sizes(), like.options().dtype(dtype));
}

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Backward : core::Private<
                      Backward,
                      Four(
                          const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                          const OptionalTensor&, int64_t, std::optional<double>, double)> {
  static constexpr const char* kName = "_delta_gates_bwd";
  static constexpr const char* kArguments = "dg, dbeta, a, b, a_log, dt_bias, wanted, lower_bound, beta_scale";

  // Upstream gradients that are undefined need not be given, if nothing wanted needs them.
  template <class Device>
  static Four run(
      const OptionalTensor& dg_given, const OptionalTensor& dbeta_given, const Tensor& a, const Tensor& b,
      const Tensor& a_log, const OptionalTensor& dt_bias, int64_t wanted, std::optional<double> lower_bound,
      double beta_scale) {
    const Tensor dg = value_or_undefined(dg_given), dbeta = value_or_undefined(dbeta_given),
                 bias = value_or_undefined(dt_bias);
    check(kBackward, a, b, a_log, bias, lower_bound);
    const auto dtype = core::compute_type(a);
    if (dg.defined()) {
      core::check_same_device(kBackward, "dg", dg, "a", a);
      LIGER_CHECK(
          dg.scalar_type() == dtype && dg.sym_sizes().equals(a.sym_sizes()), kBackward, "dg",
          c10::str("have the shape of a, ", a.sym_sizes(), ", and dtype ", dtype), dg.sym_sizes());
    }
    if (dbeta.defined()) core::check_same(kBackward, "dbeta", dbeta, "b", b);
    auto empty_if = [&](int gradient, const Tensor& upstream, const Tensor& like) {
      const bool needed = upstream.defined() && like.defined() && core::wants(wanted, gradient);
      return needed ? empty(like, like.scalar_type()) : Tensor();
    };
    Gradients out{empty_if(0, dg, a), empty_if(1, dbeta, b)};
    const Tensor da_log = empty_if(2, dg, a_log), ddt_bias = empty_if(3, dg, bias);
    if constexpr (Device::kComputes) {
      if (a.is_cpu()) runtime::count_cpu_call();
      if (a.numel() == 0) {
        if (da_log.defined()) da_log.zero_();
        if (ddt_bias.defined()) ddt_bias.zero_();
        if (out.db.defined() && b.numel()) {
          const Tensor s = b.to(dtype).sigmoid();
          out.db.copy_(dbeta.to(dtype) * s * (1 - s) * beta_scale);
        }
        return {out.da, out.db, da_log, ddt_bias};
      }
      const Inputs in = inputs_of(a, b, a_log, bias, lower_bound, beta_scale);
      const bool adds_up = in.channels() > 1;
      if (da_log.defined()) out.rate = adds_up ? at::empty({in.columns()}, a.options().dtype(dtype)) : da_log;
      if (ddt_bias.defined()) out.bias = ddt_bias.view(-1);
      const bool of_a = out.da.defined() || out.rate.defined() || out.bias.defined();
      if (of_a || out.db.defined()) {
        Device::backward(
            out, of_a ? matrix(dg, a.dim() - b.dim() + 1) : Tensor(), out.db.defined() ? matrix(dbeta, 1) : Tensor(),
            in);
      }
      if (da_log.defined() && adds_up) da_log.copy_(out.rate.view({in.heads(), in.channels()}).sum(1));
    }
    return {out.da, out.db, da_log, ddt_bias};
  }
};

struct DeltaGates
    : core::Operator<
          DeltaGates,
          std::tuple<Tensor, Tensor>(
              const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, std::optional<double>, double)> {
  static constexpr const char* kOp = delta_gates::kOp;
  static constexpr const char* kSchema = schemas::delta_gates;
  using Edges = core::Positions<0, 1, 2, 3>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>>;
  using Differentiable = core::Positions<0, 1>;
  using Privates = core::Privates<Backward>;
  using Autocast = core::AutocastPromote<0, 1>;
  using Cpu = delta_gates::Cpu;
  using Cuda = delta_gates::Cuda;
  using Meta = delta_gates::Meta;

  template <class Device>
  static R run(
      bool, const Tensor& a, const Tensor& b, const Tensor& a_log, const OptionalTensor& dt_bias,
      std::optional<double> lower_bound, double beta_scale) {
    const Tensor bias = value_or_undefined(dt_bias);
    check(kOp, a, b, a_log, bias, lower_bound);
    Tensor g = empty(a, core::compute_type(a)), beta = empty(b, b.scalar_type());
    if constexpr (Device::kComputes) {
      if (a.is_cpu()) runtime::count_cpu_call();
      if (a.numel()) {
        Device::forward(g, beta, inputs_of(a, b, a_log, bias, lower_bound, beta_scale));
      } else if (b.numel()) {
        beta.copy_(b.to(core::compute_type(b)).sigmoid().mul(beta_scale));
      }
    }
    return {g, beta};
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    const Tensor dg = std::move(grads[0]), dbeta = std::move(grads[1]);
    const bool of_a = dg.defined(), of_b = dbeta.defined();
    const int64_t wanted =
        core::wanted_bits(of_a && node.needs(0), of_b && node.needs(1), of_a && node.needs(2), of_a && node.needs(3));
    const Tensor a = node.take(0), b = node.take(1), a_log = node.take(2), bias = node.take(3);
    if (!wanted) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const auto& [lower_bound, beta_scale] = node.options;
    auto [da, db, da_log, ddt_bias] = Backward::call(dg, dbeta, a, b, a_log, bias, wanted, lower_bound, beta_scale);
    return {da, db, da_log, ddt_bias};
  }
};

}  // namespace

LIGER_OPERATOR(DeltaGates)

}  // namespace liger::ops::delta_gates
