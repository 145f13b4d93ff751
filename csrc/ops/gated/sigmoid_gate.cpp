// sigmoid_gate(x, gate, residual) = residual + x * sigmoid(gate)
//
// x, residual: (..., n) of any strides; gate: (..., n), or (..., 1) with one number per row; all of one dtype.
// Arithmetic is fp32 with one rounding. Saves x and the gate. The gradient of the residual is the incoming one. That of
// x overwrites it if nothing else can see it.

#include "core/cpu/math.h"
#include "core/rows/elements.h"
#include "core/operator.h"
#include "kernels/sigmoid_gate.h"

namespace liger::ops::sigmoid_gate {
namespace {

using at::Tensor;
using core::value_or_undefined;

constexpr const char* kOp = "sigmoid_gate";
constexpr const char* kBackward = "sigmoid_gate backward";

bool is_per_row(const Tensor& x, const Tensor& gate) { return gate.sym_sizes().back() != x.sym_sizes().back(); }

/// One number per row of `lead`, in the order of its rows. gate: (..., 1)
Tensor row_numbers(const Tensor& gate, const Tensor& lead) { return core::per_row(gate.squeeze(-1), lead); }

/// Of a gradient of a gate with one number per row, in the order of lead's rows.
Tensor empty_numbers(const Tensor& lead) { return core::empty_per_row(lead, lead.scalar_type()).unsqueeze(-1); }

// ---- CPU

/// The gate of a row, as one number.
template <class C>
C constant_gate(core::Input<C> gate) {
  return core::vector_sigmoid(core::first_number(gate));
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
    if (is_per_row(x, gate)) return forward_per_row(out, x, row_numbers(gate, out), residual);
    // 0 + turns -0 into 0, as in the kernel, which adds 0 if there is no residual.
    if (residual.defined()) {
      core::map_elements(
          kOp, [](auto v, auto g, auto r) { return r + v * core::vector_sigmoid(g); }, out, x, gate, residual);
    } else {
      core::map_elements(kOp, [](auto v, auto g) { return 0 + v * core::vector_sigmoid(g); }, out, x, gate);
    }
  }

  static void forward_per_row(Tensor out, Tensor x, const Tensor& numbers, Tensor residual) {
    const auto walk = core::walk_rows<3>(kOp, {&out, &x, &residual});
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto out_at = core::output<C>(out);
      const auto x_at = core::input<C>(x), numbers_at = core::input<C>(numbers), residual_at = core::input<C>(residual);
      core::parallel_rows(walk.rows, walk.n, [&](int64_t row) {
        const C share = core::vectorized<C>([&] { return constant_gate(numbers_at + row); });
        const auto to = out_at + walk.offset(0, row);
        const auto from = x_at + walk.offset(1, row), plus = residual_at + walk.offset(2, row);
        if (plus) {
          core::transform(to, walk.n, [share](C v, C r) { return r + v * share; }, from, plus);
        } else {
          core::transform(to, walk.n, [share](C v) { return 0 + v * share; }, from);
        }
      });
    });
  }

  static void backward(Tensor lead, Tensor dx, Tensor dgate, Tensor dout, Tensor x, Tensor gate) {
    runtime::count_cpu_call();
    if (x.numel() == 0) return dgate.defined() ? void(dgate.zero_()) : void();
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, lead) : Tensor(), full = per_row ? Tensor() : gate;
    Tensor dfull = per_row ? Tensor() : dgate;
    const auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dfull, &dout, &x, &full});
    core::dispatch_compute(x.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto dx_at = core::output<C>(dx), dgate_at = core::output<C>(dgate);
      const auto dout_at = core::input<C>(dout), x_at = core::input<C>(x);
      const auto gate_at = core::input<C>(per_row ? numbers : full);
      core::parallel_rows(walk.rows, walk.n, [&](int64_t row) {
        core::vectorized<C>([&] {
          backward_row<C>(
              dx_at + walk.offset(1, row), dgate_at + (per_row ? row : walk.offset(2, row)),
              dout_at + walk.offset(3, row), x_at + walk.offset(4, row),
              gate_at + (per_row ? row : walk.offset(5, row)), per_row, walk.n);
        });
      });
    });
  }
};

// ---- CUDA

namespace flags = kernels::constants::sigmoid_gate;

struct Cuda {
  template <class K, size_t N>
  static void start(const char* op, const Tensor& x, bool per_row, const core::Rows<N>& walk, typename K::Args& args) {
    walk.pass(args);
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(x)), per_row);
    const auto choice = core::choose<K>(walk.n, args, point);
    core::launch(op, x.device(), choice, {core::programs_for(walk.rows, choice.config.BLOCK_M)}, args);
  }

  static void forward(Tensor out, Tensor x, Tensor gate, Tensor residual) {
    using K = kernels::sigmoid_gate_fwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, out) : Tensor(), full = per_row ? Tensor() : gate;
    const auto walk = core::walk_rows<4>(kOp, {&out, &x, &full, &residual});
    K::Args args{
        .out = core::address(out),
        .x = core::address(x),
        .gate = core::address(full),
        .numbers = core::address(numbers),
        .residual = core::address(residual),
        .out_strides = walk.strides[0],
        .x_strides = walk.strides[1],
        .gate_strides = walk.strides[2],
        .residual_strides = walk.strides[3],
        .flags = residual.defined() ? flags::HAS_RESIDUAL : 0};
    start<K>(kOp, x, per_row, walk, args);
  }

  static void backward(Tensor lead, Tensor dx, Tensor dgate, Tensor dout, Tensor x, Tensor gate) {
    using K = kernels::sigmoid_gate_bwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return dgate.defined() ? void(dgate.zero_()) : void();
    const bool per_row = is_per_row(x, gate);
    Tensor numbers = per_row ? row_numbers(gate, lead) : Tensor(), full = per_row ? Tensor() : gate;
    Tensor dfull = per_row ? Tensor() : dgate;
    const auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dfull, &dout, &x, &full});
    K::Args args{
        .dx = core::address(dx),
        .dgate = core::address(dfull),
        .dnumbers = per_row ? core::address(dgate) : nullptr,
        .dout = core::address(dout),
        .x = core::address(x),
        .gate = core::address(full),
        .numbers = core::address(numbers),
        .dx_strides = walk.strides[1],
        .dgate_strides = walk.strides[2],
        .dout_strides = walk.strides[3],
        .x_strides = walk.strides[4],
        .gate_strides = walk.strides[5],
        .flags = (dx.defined() ? flags::NEEDS_DX : 0) | (dgate.defined() ? flags::NEEDS_DGATE : 0)};
    start<K>(kBackward, x, per_row, walk, args);
  }
};

struct Meta {
  static void forward(const auto&...) {}
  static void backward(const auto&...) {}
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

using Two = std::tuple<Tensor, Tensor>;

struct Backward
    : core::Private<Backward, Two(const Tensor&, const Tensor&, const Tensor&, int64_t), core::Overwrites<0>> {
  static constexpr const char* kName = "_sigmoid_gate_bwd";
  static constexpr const char* kArguments = "dout, x, gate, wanted";

  template <class Device>
  static Two run(const Into& into, const Tensor& dout, const Tensor& x, const Tensor& gate, int64_t wanted) {
    check(kBackward, x, gate);
    core::check_same(kBackward, "dout", dout, "x", x);
    const Tensor dx = core::result_rows(into[0], core::wants(wanted, 0), x);
    const Tensor lead = core::lead_of(dx, x);
    Tensor dgate;
    if (core::wants(wanted, 1)) dgate = is_per_row(x, gate) ? empty_numbers(lead) : core::empty_rows_like(lead);
    Device::backward(lead, dx, dgate, dout, x, gate);
    return {dx, dgate};
  }
};

struct SigmoidGate : core::Operator<SigmoidGate, Tensor(const Tensor&, const Tensor&, const OptionalTensor&)> {
  static constexpr const char* kOp = sigmoid_gate::kOp;
  static constexpr const char* kSchema = schemas::sigmoid_gate;
  using Edges = core::Positions<0, 1, 2>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>>;
  using Privates = core::Privates<Backward>;
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

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = node.take(0), gate = node.take(1), dx, dgate;
    const int64_t wanted = core::wanted_bits(node.needs(0), node.needs(1));
    if (wanted) {
      const bool overwrite = node.needs(0) && !node.needs(2) && node.may_overwrite(dout, x);
      std::tie(dx, dgate) = Backward::call(overwrite, dout, x, gate, wanted);
    }
    return {dx, dgate, node.needs(2) ? dout : Tensor()};
  }
};

}  // namespace

LIGER_OPERATOR(SigmoidGate)

}  // namespace liger::ops::sigmoid_gate
