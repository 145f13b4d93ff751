// quantize_rows(x), quantize_columns(x), quantize_both(x): matrices in e4m3 with one fp32 scale per row, or per column
// of x in a transposed copy.
//
// x: (..., n) of any strides, T rows. Results are contiguous. A scale is amax / 448, of zeros 1; q = x * (1 / scale).
// Launches: of rows one; of columns three, the first of which also writes the rows where they fit into registers.

#include "ops/fp8/quantize.h"

#include <c10/util/Float8_e4m3fn.h>

#include "core/cpu/loops.h"
#include "core/cuda.h"
#include "core/rows.h"
#include "kernels/quantize_rows.h"

namespace liger::ops::quantize_rows {
namespace {

using at::Tensor;

constexpr float kLargest = 448, kLeastScale = std::numeric_limits<float>::min();

c10::SymInt rows_of(const Tensor& x) { return c10::multiply_integers(x.sym_sizes().slice(0, x.dim() - 1)); }

Quantized allocate(at::TensorList xs, bool rows, Columns columns) {
  Quantized out;
  const Tensor& x = xs[0];
  const auto e4m3 = x.options().dtype(at::kFloat8_e4m3fn).memory_format(at::MemoryFormat::Contiguous);
  const auto fp32 = x.options().dtype(at::kFloat);
  const auto n = x.sym_sizes().back();
  c10::SymInt count = 0;
  for (const Tensor& each : xs) count = count + rows_of(each);
  if (rows) {
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    if (xs.size() > 1) sizes = {count, n};
    out.q = at::empty_symint(sizes, e4m3);
    sizes.back() = 1;
    out.scale = at::empty_symint(sizes, fp32);
  }
  if (columns == Columns::all) out.q_t = at::empty_symint({n, count}, e4m3);
  if (columns != Columns::none) out.scale_t = at::empty_symint({n, 1}, fp32);
  return out;
}

void check(const char* op, at::TensorList xs) {
  for (const Tensor& x : xs) core::check_activation(op, "x", x);
}

/// Without elements there are rows or columns of zeros, at most.
void fill_scales(Quantized& out) {
  if (out.scale.defined()) out.scale.fill_(1);
  if (out.scale_t.defined()) out.scale_t.fill_(1);
}

// ---- CPU

template <class C>
float scale_of(const C* x, int64_t n) {
  float peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::abs(float(x[i]));
    peak = v > peak || v != v ? v : peak;
    if (peak != peak) break;
  }
  const float least = peak / kLargest < kLeastScale ? kLeastScale : peak / kLargest;
  return peak == 0 ? 1 : least;
}

}  // namespace

void quantize_rows_of(const Tensor& q, const Tensor& scale, const Tensor& x, bool given) {
  const Tensor rows = x.contiguous();
  const int64_t n = x.size(-1), count = x.numel() / n;
  core::dispatch_compute(x.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const auto from = core::input<C>(rows);
    auto* to = q.defined() ? q.data_ptr<c10::Float8_e4m3fn>() : nullptr;
    float* scales = scale.data_ptr<float>();
    core::parallel_ranges(count, core::cpu_ranges(count, n), [&](int64_t, int64_t begin, int64_t end) {
      std::vector<C> stage = core::make_stage<C>(from.storage, n);
      for (int64_t row = begin; row < end; ++row) {
        const C* numbers = core::widen_all(from + row * n, stage.data(), n);
        if (!given) scales[row] = scale_of(numbers, n);
        const float factor = 1 / scales[row];
        for (int64_t i = 0; to && i < n; ++i) to[row * n + i] = c10::Float8_e4m3fn(float(numbers[i]) * factor);
      }
    });
  });
}

namespace {

// ---- CUDA

/// A matrix as rows of the kernels, which are those from `first` on of a result.
struct Part {
  Tensor x;
  core::Rows<2> walk;
  int64_t first;
};

/// x is copied if two levels of strides cannot describe it. lead: its shape and the layout of the result.
Part part_of(const char* op, Tensor x, Tensor lead, int64_t first) {
  const auto walk = core::walk_rows<2>(op, {&lead, &x});
  return {std::move(x), walk, first};
}

template <class Args>
void set_rows(Args& args, const Part& part) {
  const auto& [x, walk, first] = part;
  args.x = core::address(x);
  args.rows = int32_t(walk.rows), args.n = int32_t(walk.n), args.inner_rows = walk.kernel_inner_rows();
  args.x_outer = walk.strides[1].outer, args.x_inner = walk.strides[1].inner;
}

bool is_aligned(const Part& part) { return quantize::is_aligned(part.x, part.walk, part.first); }

template <class K>
int64_t blocks_of(const typename K::Config& config, int64_t rows) {
  return (rows + config.BLOCK_M - 1) / config.BLOCK_M;
}

/// With peaks: returns the largest magnitudes of the columns, (programs, n).
template <class K>
Tensor launch_rows(const char* op, const Quantized& out, const Part& part, bool peaks) {
  const auto& [x, walk, first] = part;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)), 0, peaks ? 1 : 0);
  const Tensor q = out.q.view({-1, walk.n}).narrow(0, first, walk.rows);
  const Tensor scale = out.scale.view({-1, 1}).narrow(0, first, walk.rows);
  const auto& config = runtime::first_fit<K>(walk.n, is_aligned(part), point);
  int64_t programs = blocks_of<K>(config, walk.rows);
  typename K::Args args{};
  Tensor parts;
  if (peaks) {
    // Two of 8 warps, which keep a row and the columns' maxima in registers.
    programs = core::persistent_programs(x.device(), programs, 16 / config.num_warps);
    parts = at::empty({programs, walk.n}, x.options().dtype(at::kInt));
    args.parts = core::address(parts);
  }
  args.q = core::address(q), args.scale = core::address(scale);
  set_rows(args, part);
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  return parts;
}

Tensor column_peaks(const char* op, const Part& part) {
  using K = kernels::column_peaks;
  const auto& [x, walk, first] = part;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)));
  const auto& config = runtime::first_fit<K>(walk.n, is_aligned(part), point);
  const int64_t across = (walk.n + config.BLOCK_N - 1) / config.BLOCK_N;
  const int64_t programs = core::persistent_programs(x.device(), across * blocks_of<K>(config, walk.rows), 8);
  const int64_t down = std::min(blocks_of<K>(config, walk.rows), std::max<int64_t>(1, programs / across));
  const Tensor parts = at::empty({down, walk.n}, x.options().dtype(at::kInt));
  K::Args args{};
  args.parts = core::address(parts);
  set_rows(args, part);
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(across), uint32_t(down)}, args);
  return parts;
}

void column_scales(const char* op, const Tensor& scale_t, const Tensor& parts) {
  using K = kernels::column_scales;
  const int64_t n = parts.size(1);
  const auto point = runtime::point_of<K>(0);
  const bool aligned = core::aligned16(core::address(scale_t), core::address(parts)) && n % 8 == 0;
  const auto& config = runtime::first_fit<K>(n, aligned, point);
  K::Args args{core::address(scale_t), core::address(parts), int32_t(parts.size(0)), int32_t(n)};
  core::launch<K>(
      op, scale_t.device(), runtime::variant_index<K>(config, point),
      {uint32_t((n + config.BLOCK_N - 1) / config.BLOCK_N)}, args);
}

template <class K>
void launch_columns(const char* op, const Quantized& out, const Part& part) {
  const auto& [x, walk, first] = part;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)), 0);
  const Tensor q_t = out.q_t.narrow(1, first, walk.rows);
  const int64_t pitch = out.q_t.size(1);
  const auto& config = runtime::first_fit<K>(walk.n, is_aligned(part) && ((pitch | walk.rows) & 7) == 0, point);
  typename K::Args args{};
  args.q_t = core::address(q_t), args.scale_t = core::address(out.scale_t), args.pitch = int32_t(pitch);
  set_rows(args, part);
  const int64_t blocks = blocks_of<K>(config, walk.rows) * ((walk.n + config.BLOCK_N - 1) / config.BLOCK_N);
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks)}, args);
}

/// Whether a config for this part has the whole row in registers, and so the columns' maxima.
template <class K>
bool keeps_peaks(const Part& part) {
  if constexpr (K::columns_count == 1) return false;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(part.x)), 0, 1);
  return runtime::first_fit<K>(part.walk.n, is_aligned(part), point).TILES != 0;
}

template <class OfColumns>
void transpose(const char* op, const Quantized& out, const std::vector<Part>& parts) {
  for (const Part& part : parts) launch_columns<OfColumns>(op, out, part);
}

/// OfRows, OfColumns: kernels that convert by an instruction or by integer arithmetic.
template <class OfRows, class OfColumns>
void compute(const char* op, const Quantized& out, const std::vector<Part>& parts) {
  std::vector<Tensor> peaks;
  const bool columns = out.scale_t.defined();
  for (const Part& part : parts) {
    const bool keeps = columns && keeps_peaks<OfRows>(part);
    Tensor found;
    if (out.q.defined()) found = launch_rows<OfRows>(op, out, part, keeps);
    if (columns) peaks.push_back(found.defined() ? found : column_peaks(op, part));
  }
  if (columns) column_scales(op, out.scale_t, peaks.size() == 1 ? peaks[0] : at::cat(peaks));
  if (out.q_t.defined()) transpose<OfColumns>(op, out, parts);
}

// ---- Operators

template <class Op, class Type>
struct Quantizer : quantize::Operator<Op, Type> {
  using Cpu = quantize_rows::Cpu;
  using Cuda = quantize_rows::Cuda;
  using Meta = quantize_rows::Meta;
};

using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct QuantizeRows : Quantizer<QuantizeRows, Two(const Tensor&)> {
  static constexpr const char* kOp = "quantize_rows";
  static constexpr const char* kSchema = schemas::quantize_rows;

  template <class Device>
  static Two run(bool, const Tensor& x) {
    Quantized out = Device::quantize(kOp, {x}, true, Columns::none);
    return {std::move(out.q), std::move(out.scale)};
  }
};

struct QuantizeColumns : Quantizer<QuantizeColumns, Two(const Tensor&)> {
  static constexpr const char* kOp = "quantize_columns";
  static constexpr const char* kSchema = schemas::quantize_columns;

  template <class Device>
  static Two run(bool, const Tensor& x) {
    Quantized out = Device::quantize(kOp, {x}, false, Columns::all);
    return {std::move(out.q_t), std::move(out.scale_t)};
  }
};

struct QuantizeBoth : Quantizer<QuantizeBoth, Four(const Tensor&)> {
  static constexpr const char* kOp = "quantize_both";
  static constexpr const char* kSchema = schemas::quantize_both;

  template <class Device>
  static Four run(bool, const Tensor& x) {
    Quantized out = Device::quantize(kOp, {x}, true, Columns::all);
    return {std::move(out.q), std::move(out.scale), std::move(out.q_t), std::move(out.scale_t)};
  }
};

}  // namespace

Quantized Cpu::quantize(const char* op, at::TensorList xs, bool rows, Columns columns) {
  check(op, xs);
  runtime::count_cpu_call();
  Quantized out = allocate(xs, rows, columns);
  const Tensor x = xs.size() == 1 ? xs[0] : at::cat(xs);
  if (x.numel() == 0) {
    fill_scales(out);
    return out;
  }
  if (rows) quantize_rows_of(out.q, out.scale, x, false);
  if (columns != Columns::none) quantize_rows_of(out.q_t, out.scale_t, core::as_matrix(x).t(), false);
  return out;
}

Quantized Cpu::with_scales(const char* op, at::TensorList xs, const Tensor& scale_t) {
  check(op, xs);
  Quantized out = allocate(xs, false, Columns::all);
  out.scale_t = scale_t;
  const Tensor x = at::cat(xs);
  if (x.numel() != 0) quantize_rows_of(out.q_t, scale_t, x.t(), true);
  return out;
}

namespace {

std::vector<Part> parts_of(const char* op, at::TensorList xs, const Tensor& result) {
  std::vector<Part> parts;
  int64_t first = 0;
  for (const Tensor& x : xs) {
    const int64_t count = rows_of(x).expect_int();
    // Only the lead's shape and layout are used.
    const Tensor lead = result.view({-1}).narrow(0, first * x.size(-1), x.numel()).view(x.sizes());
    if (count) parts.push_back(part_of(op, x, lead, first));
    first += count;
  }
  return parts;
}

/// Calls f with the kernels of rows and columns that fit the device.
template <class F>
void with_kernels(const Tensor& x, const F& f) {
  if (core::is_for<kernels::quantize_rows_e4m3>(x.device())) {
    f(kernels::quantize_rows_e4m3(), kernels::quantize_columns_e4m3());
  } else {
    f(kernels::quantize_rows(), kernels::quantize_columns());
  }
}

}  // namespace

Quantized Cuda::quantize(const char* op, at::TensorList xs, bool rows, Columns columns) {
  check(op, xs);
  c10::DeviceGuard guard(xs[0].device());
  Quantized out = allocate(xs, rows, columns);
  const Tensor& result = rows ? out.q : out.q_t;
  if (result.numel() == 0) {
    fill_scales(out);
    return out;
  }
  const auto parts = parts_of(op, xs, result);
  with_kernels(
      xs[0], [&](auto of_rows, auto of_columns) { compute<decltype(of_rows), decltype(of_columns)>(op, out, parts); });
  return out;
}

Quantized Cuda::with_scales(const char* op, at::TensorList xs, const Tensor& scale_t) {
  check(op, xs);
  c10::DeviceGuard guard(xs[0].device());
  Quantized out = allocate(xs, false, Columns::all);
  out.scale_t = scale_t;
  if (out.q_t.numel() == 0) return out;
  const auto parts = parts_of(op, xs, out.q_t);
  with_kernels(xs[0], [&](auto, auto of_columns) { transpose<decltype(of_columns)>(op, out, parts); });
  return out;
}

Quantized Meta::quantize(const char* op, at::TensorList xs, bool rows, Columns columns) {
  check(op, xs);
  return allocate(xs, rows, columns);
}

Quantized Meta::with_scales(const char* op, at::TensorList xs, const Tensor& scale_t) {
  check(op, xs);
  Quantized out = allocate(xs, false, Columns::all);
  out.scale_t = scale_t;
  return out;
}

LIGER_OPERATOR(QuantizeRows)
LIGER_OPERATOR(QuantizeColumns)
LIGER_OPERATOR(QuantizeBoth)

}  // namespace liger::ops::quantize_rows
