#include "gemm/e4m3/rows.h"

#include <c10/util/Float8_e4m3fn.h>

#include "core/rows/elements.h"
#include "kernels/quantize_rows.h"

namespace liger::gemm::e4m3::rows {
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

template <class Args>
void pass(const Part& part, Args& args) {
  part.walk.pass(args);
  args.x = core::address(part.x);
  args.x_strides = part.walk.strides[1];
}

/// Also returns the largest magnitudes of the columns, (programs, n), if they are wanted and a program has whole rows.
template <class K>
Tensor launch_rows(const char* op, const Quantized& out, const Part& part, bool wants_peaks) {
  const auto& [x, walk, first] = part;
  const Tensor q = out.q.view({-1, walk.n}).narrow(0, first, walk.rows);
  const Tensor scale = out.scale.view({-1, 1}).narrow(0, first, walk.rows);
  typename K::Args args{.q = core::address(q), .scale = core::address(scale)};
  pass(part, args);
  auto choose = [&](bool peaks) {
    return core::choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(core::dtype_of(x)), 0, peaks));
  };
  const bool keeps_peaks = wants_peaks && K::columns_count > 1 && choose(true).config.TILES != 0;
  const auto choice = choose(keeps_peaks);
  int64_t programs = core::programs_for(walk.rows, choice.config.BLOCK_M);
  Tensor parts;
  if (keeps_peaks) {
    // Two of 8 warps, which keep a row and the columns' maxima in registers.
    programs = core::persistent_programs(x.device(), programs, 16 / choice.config.num_warps);
    parts = at::empty({programs, walk.n}, x.options().dtype(at::kInt));
    args.parts = core::address(parts);
  }
  core::launch(op, x.device(), choice, {uint32_t(programs)}, args);
  return parts;
}

Tensor column_peaks(const char* op, const Part& part) {
  using K = kernels::column_peaks;
  const auto& [x, walk, first] = part;
  K::Args args{};
  pass(part, args);
  const auto choice = core::choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(core::dtype_of(x))));
  const int64_t across = core::programs_for(walk.n, choice.config.BLOCK_N);
  const int64_t blocks = core::programs_for(walk.rows, choice.config.BLOCK_M);
  const int64_t programs = core::persistent_programs(x.device(), across * blocks, 8);
  const int64_t down = std::min(blocks, std::max<int64_t>(1, programs / across));
  const Tensor parts = at::empty({down, walk.n}, x.options().dtype(at::kInt));
  args.parts = core::address(parts);
  core::launch(op, x.device(), choice, {uint32_t(across), uint32_t(down)}, args);
  return parts;
}

void column_scales(const char* op, const Tensor& scale_t, const Tensor& parts) {
  using K = kernels::column_scales;
  const int64_t n = parts.size(1);
  const K::Args args{core::address(scale_t), core::address(parts), int32_t(parts.size(0)), int32_t(n)};
  const auto choice = core::choose<K>(n, args);
  core::launch(op, scale_t.device(), choice, {core::programs_for(n, choice.config.BLOCK_N)}, args);
}

/// K: the kernel of columns.
template <class K>
void transpose(const char* op, const Quantized& out, const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    const auto& [x, walk, first] = part;
    const Tensor q_t = out.q_t.narrow(1, first, walk.rows);
    typename K::Args args{
        .q_t = core::address(q_t), .scale_t = core::address(out.scale_t), .pitch = int32_t(out.q_t.size(1))};
    pass(part, args);
    const auto choice = core::choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(core::dtype_of(x)), 0));
    core::launch(op, x.device(), choice, {uint32_t(core::tiles_of(choice.config, walk))}, args);
  }
}

/// OfRows, OfColumns: kernels that convert by an instruction or by integer arithmetic.
template <class OfRows, class OfColumns>
void compute(const char* op, const Quantized& out, const std::vector<Part>& parts) {
  std::vector<Tensor> peaks;
  const bool columns = out.scale_t.defined();
  for (const Part& part : parts) {
    Tensor found;
    if (out.q.defined()) found = launch_rows<OfRows>(op, out, part, columns);
    if (columns) peaks.push_back(found.defined() ? found : column_peaks(op, part));
  }
  if (columns) column_scales(op, out.scale_t, peaks.size() == 1 ? peaks[0] : at::cat(peaks));
  if (out.q_t.defined()) transpose<OfColumns>(op, out, parts);
}

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

}  // namespace liger::gemm::e4m3::rows
