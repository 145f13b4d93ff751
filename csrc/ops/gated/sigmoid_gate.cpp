// sigmoid_gate(x, gate, residual) = residual + x * sigmoid(gate)
//
// x, residual: (..., n) of any strides; gate: (..., n), or (..., 1) with one number per row; all of one dtype.
// Arithmetic is fp32 with one rounding. Saves x and the gate. The gradient of the residual is the incoming one. That of
// x overwrites it if nothing else can see it.

#include "core/cpu/loops.h"
#include "core/cpu/math.h"
#include "core/cuda.h"
#include "core/operator.h"
#include "core/rows.h"
#include "kernels/sigmoid_gate.h"

namespace liger::ops::sigmoid_gate {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

constexpr const char* kOp = "sigmoid_gate";
constexpr const char* kBackward = "sigmoid_gate backward";
/// A bit of `wanted`, besides kWantInput.
constexpr int64_t kWantGate = core::kWantWeight;

bool is_per_row(const Tensor& x, const Tensor& gate) { return gate.sym_sizes().back() != x.sym_sizes().back(); }

/// One number per row of `lead`, in the order of its rows. t: (..., 1), undefined if not needed
Tensor row_numbers(const Tensor& t, const Tensor& lead) { return t.defined() ? core::per_row(t.squeeze(-1), lead) : t; }

/// Of a gradient of a gate with one number per row, in the order of lead's rows.
Tensor empty_numbers(const Tensor& lead) { return core::empty_per_row(lead, lead.scalar_type()).unsqueeze(-1); }

// ---- CPU

/// The gate of a row, as one number.
template <class C>
C constant_gate(core::Input<C> gate) {
  return core::vector_sigmoid(core::first_number(gate));
}

template <class C>
void forward_row(
    core::Output<C> out, core::Input<C> x, core::Input<C> gate, core::Input<C> residual, bool per_row, int64_t n) {
  const C constant = per_row ? constant_gate(gate) : C(0);
  C stages[4][core::kColumnsPerSum];
  for (int64_t first = 0; first < n; first += core::kColumnsPerSum) {
    const int64_t count = std::min(core::kColumnsPerSum, n - first);
    const C* v = core::widen_all(x + first, stages[0], count);
    const C* g = per_row ? v : core::widen_all(gate + first, stages[1], count);
    const C* r = residual ? core::widen_all(residual + first, stages[2], count) : nullptr;
    C* to = core::target(out + first, stages[3]);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const C share = per_row ? constant : core::vector_sigmoid(g[i]);
      to[i] = (r ? r[i] : C(0)) + v[i] * share;
    }
    core::narrow_all(out + first, to, count);
  }
}

/// dx may be dout. dx and dgate may be null.
template <class C>
void backward_row(
    core::Output<C> dx, core::Output<C> dgate, core::Input<C> dout, core::Input<C> x, core::Input<C> gate, bool per_row,
    int64_t n) {
  const C constant = per_row ? constant_gate(gate) : C(0);
  double total = 0;
  C stages[5][core::kColumnsPerSum];
  for (int64_t first = 0; first < n; first += core::kColumnsPerSum) {
    C sum = 0;
    const int64_t count = std::min(core::kColumnsPerSum, n - first);
    const C *d = core::widen_all(dout + first, stages[0], count), *v = core::widen_all(x + first, stages[1], count);
    const C* g = per_row ? v : core::widen_all(gate + first, stages[2], count);
    C* of_x = dx ? core::target(dx + first, stages[3]) : nullptr;
    C* of_gate = dgate && !per_row ? core::target(dgate + first, stages[4]) : nullptr;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
      const C upstream = d[i], share = per_row ? constant : core::vector_sigmoid(g[i]), slope = upstream * v[i];
      sum += slope;
      if (of_gate) of_gate[i] = slope * share * (1 - share);
      if (of_x) of_x[i] = upstream * share;
    }
    if (of_gate) core::narrow_all(dgate + first, of_gate, count);
    if (of_x) core::narrow_all(dx + first, of_x, count);
    total += double(sum);
  }
  if (dgate && per_row) {
    const C slope = C(total) * constant * (1 - constant);
    core::store_all(dgate, &slope, 1);
  }
}

struct Cpu {
  static void forward(Tensor out, Tensor x, Tensor gate, Tensor residual) {
    runtime::count_cpu_call();
    if (x.numel() == 0) return;
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, out) : Tensor(), full = per_row ? Tensor() : gate;
    auto walk = core::walk_rows<4>(kOp, {&out, &x, &full, &residual});
    const auto& [to, from, by, plus] = walk.strides;
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto out_at = core::output<C>(out);
      const auto x_at = core::input<C>(x), gate_at = core::input<C>(per_row ? numbers : full);
      const auto residual_at = core::input<C>(residual);
      core::parallel_ranges(
          walk.rows, core::cpu_ranges(walk.rows, walk.n),
          [&, to = to, from = from, by = by, plus = plus](int64_t, int64_t begin, int64_t end) {
            const int64_t inner = walk.inner_rows;
            core::vectorized<C>([&] {
              for (int64_t row = begin; row < end; ++row) {
                forward_row<C>(
                    out_at + to.offset(row, inner), x_at + from.offset(row, inner),
                    gate_at + (per_row ? row : by.offset(row, inner)), residual_at + plus.offset(row, inner), per_row,
                    walk.n);
              }
            });
          });
    });
  }

  static void backward(Tensor lead, Tensor dx, Tensor dgate, Tensor dout, Tensor x, Tensor gate) {
    runtime::count_cpu_call();
    if (x.numel() == 0) return dgate.defined() ? void(dgate.zero_()) : void();
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, lead) : Tensor(), full = per_row ? Tensor() : gate;
    Tensor dfull = per_row ? Tensor() : dgate;
    auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dfull, &dout, &x, &full});
    const auto& [first, to, to_gate, grad, from, by] = walk.strides;
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto dx_at = core::output<C>(dx), dgate_at = core::output<C>(dgate);
      const auto dout_at = core::input<C>(dout), x_at = core::input<C>(x);
      const auto gate_at = core::input<C>(per_row ? numbers : full);
      core::parallel_ranges(
          walk.rows, core::cpu_ranges(walk.rows, walk.n),
          [&, to = to, to_gate = to_gate, grad = grad, from = from, by = by](int64_t, int64_t begin, int64_t end) {
            const int64_t inner = walk.inner_rows;
            core::vectorized<C>([&] {
              for (int64_t row = begin; row < end; ++row) {
                backward_row<C>(
                    dx_at + to.offset(row, inner), dgate_at + (per_row ? row : to_gate.offset(row, inner)),
                    dout_at + grad.offset(row, inner), x_at + from.offset(row, inner),
                    gate_at + (per_row ? row : by.offset(row, inner)), per_row, walk.n);
              }
            });
          });
    });
  }
};

// ---- CUDA

namespace flags = kernels::constants::sigmoid_gate;

struct Cuda {
  template <class K, size_t N>
  static void start(
      const char* op, const Tensor& x, bool per_row, bool aligned, const core::Rows<N>& walk, typename K::Args& args) {
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(x)), per_row);
    const auto& config = runtime::first_fit<K>(walk.n, aligned && walk.aligned_strides(), point);
    args.rows = int32_t(walk.rows), args.n = int32_t(walk.n), args.inner_rows = walk.kernel_inner_rows();
    const int64_t programs = (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M;
    core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  }

  static void forward(Tensor out, Tensor x, Tensor gate, Tensor residual) {
    using K = kernels::sigmoid_gate_fwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, out) : Tensor(), full = per_row ? Tensor() : gate;
    auto walk = core::walk_rows<4>(kOp, {&out, &x, &full, &residual});
    const auto& [to, from, by, plus] = walk.strides;
    K::Args args{};
    args.out = core::address(out), args.x = core::address(x);
    args.gate = core::address(full), args.numbers = core::address(numbers);
    args.residual = core::address(residual);
    args.out_outer = to.outer, args.out_inner = to.inner, args.x_outer = from.outer, args.x_inner = from.inner;
    args.gate_outer = by.outer, args.gate_inner = by.inner;
    args.residual_outer = plus.outer, args.residual_inner = plus.inner;
    args.flags = residual.defined() ? flags::HAS_RESIDUAL : 0;
    const bool aligned = core::aligned16(args.out, args.x, args.gate, args.residual);
    start<K>(kOp, x, per_row, aligned, walk, args);
  }

  static void backward(Tensor lead, Tensor dx, Tensor dgate, Tensor dout, Tensor x, Tensor gate) {
    using K = kernels::sigmoid_gate_bwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return dgate.defined() ? void(dgate.zero_()) : void();
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, lead) : Tensor(), full = per_row ? Tensor() : gate;
    Tensor dfull = per_row ? Tensor() : dgate;
    auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dfull, &dout, &x, &full});
    const auto& [first, to, to_gate, grad, from, by] = walk.strides;
    K::Args args{};
    args.dx = core::address(dx), args.dgate = core::address(dfull), args.dout = core::address(dout);
    args.x = core::address(x), args.gate = core::address(full), args.numbers = core::address(numbers);
    args.dnumbers = per_row ? core::address(dgate) : nullptr;
    args.dx_outer = to.outer, args.dx_inner = to.inner;
    args.dgate_outer = to_gate.outer, args.dgate_inner = to_gate.inner;
    args.dout_outer = grad.outer, args.dout_inner = grad.inner, args.x_outer = from.outer, args.x_inner = from.inner;
    args.gate_outer = by.outer, args.gate_inner = by.inner;
    args.flags = (dx.defined() ? flags::NEEDS_DX : 0) | (dgate.defined() ? flags::NEEDS_DGATE : 0);
    const bool aligned = core::aligned16(args.dx, args.dgate, args.dout, args.x, args.gate);
    start<K>(kBackward, x, per_row, aligned, walk, args);
  }
};

struct Meta {
  static void forward(const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}
  static void backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}
};

void check(const char* op, const Tensor& x, const Tensor& gate) {
  core::check_rows(op, "x", x);
  core::check_same_device(op, "gate", gate, "x", x);
  core::check_dense(op, "gate", gate);
  LIGER_CHECK(
      gate.scalar_type() == x.scalar_type(), op, "gate", c10::str("have the dtype of x, ", x.scalar_type()),
      gate.scalar_type());
  const auto sizes = x.sym_sizes();
  const bool rows = gate.dim() == x.dim() && gate.sym_sizes().slice(0, x.dim() - 1).equals(sizes.slice(0, x.dim() - 1));
  LIGER_CHECK(
      rows && (gate.sym_sizes().back() == 1 || gate.sym_sizes().back() == sizes.back()), op, "gate",
      c10::str("have the shape of x, ", sizes, ", or 1 as its last dimension"), gate.sym_sizes());
}

struct SigmoidGate : core::Operator<SigmoidGate, Tensor(const Tensor&, const Tensor&, const OptionalTensor&)> {
  static constexpr const char* kOp = sigmoid_gate::kOp;
  static constexpr const char* kSchema = schemas::sigmoid_gate;
  using Edges = core::Positions<0, 1, 2>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>>;
  using Cpu = sigmoid_gate::Cpu;
  using Cuda = sigmoid_gate::Cuda;
  using Meta = sigmoid_gate::Meta;

  // As PyTorch's arithmetic, in the widest dtype.
  struct Autocast {
    static constexpr bool kCpu = true, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      auto& [x, gate, residual] = arguments;
      auto wide = at::promote_types(x.scalar_type(), gate.scalar_type());
      if (residual && residual->defined()) {
        wide = at::promote_types(wide, residual->scalar_type());
        residual = residual->to(wide);
      }
      x = x.to(wide), gate = gate.to(wide);
    }
  };

  template <class Device>
  static Tensor run(bool, const Tensor& x, const Tensor& gate, const OptionalTensor& residual) {
    check(kOp, x, gate);
    const Tensor plus = value_or_undefined(residual);
    if (plus.defined()) core::check_same(kOp, "residual", plus, "x", x);
    Tensor out = core::empty_rows_like(x);
    Device::forward(out, x, gate, plus);
    return out;
  }

  template <class Device>
  static Tensor differentiate(
      const Tensor& dx, const Tensor& dout, const Tensor& x, const Tensor& gate, int64_t wanted) {
    check(kBackward, x, gate);
    core::check_same(kBackward, "dout", dout, "x", x);
    Tensor lead = dx.defined() ? dx : core::empty_rows_like(x), dgate;
    if (wanted & kWantGate) dgate = is_per_row(x, gate) ? empty_numbers(lead) : core::empty_rows_like(lead);
    Device::backward(lead, dx, dgate, dout, x, gate);
    return dgate;
  }

  template <class Device>
  static std::tuple<Tensor, Tensor> bwd(const Tensor& dout, const Tensor& x, const Tensor& gate, int64_t wanted) {
    const Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
    return {dx, differentiate<Device>(dx, dout, x, gate, wanted)};
  }

  // Overwrites dout with dx.
  template <class Device>
  static Tensor bwd_(Tensor& dout, const Tensor& x, const Tensor& gate, int64_t wanted) {
    return differentiate<Device>(dout, dout, x, gate, wanted);
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_sigmoid_gate_bwd", "Tensor(a!) dout, Tensor x, Tensor gate, int wanted", "(Tensor, Tensor)", "Tensor");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_sigmoid_gate_bwd");
    core::implement<bwd_<Device>>(m, "_sigmoid_gate_bwd_");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), gate = node.take(1);
    const int64_t wanted = core::wanted_bits(node.needs(0), node.needs(1));
    if (node.needs(0) && !node.needs(2) && node.may_overwrite(dout, x)) {
      static const auto op = core::find_op<decltype(bwd_<Meta>)>("_sigmoid_gate_bwd_");
      Tensor dgate = op.call(dout, x, gate, wanted);
      return {dout, dgate, Tensor()};
    }
    Tensor dx, dgate;
    if (wanted) {
      static const auto op = core::find_op<decltype(bwd<Meta>)>("_sigmoid_gate_bwd");
      std::tie(dx, dgate) = op.call(dout, x, gate, wanted);
    }
    return {dx, dgate, node.needs(2) ? dout : Tensor()};
  }
};

}  // namespace

LIGER_OPERATOR(SigmoidGate)

}  // namespace liger::ops::sigmoid_gate
