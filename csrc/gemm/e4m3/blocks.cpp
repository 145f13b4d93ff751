#include "gemm/e4m3/blocks.h"

#include "core/rows/elements.h"
#include "kernels/quantize_blocks.h"
#include "gemm/e4m3/rows.h"

namespace liger::gemm::e4m3::blocks {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;

c10::SymInt blocks_of(const c10::SymInt& n, int64_t block = kBlock) { return (n + (block - 1)) / block; }
c10::SymInt rounded_up(const c10::SymInt& n, int64_t multiple) { return blocks_of(n, multiple) * multiple; }

/// (rows, columns), with neighbouring rows side by side.
Tensor by_columns(const c10::SymInt& rows, const c10::SymInt& columns, const at::TensorOptions& options) {
  return at::empty_symint({columns, rows}, options).t();
}

/// Padding is 1, so that no NaN meets a zero.
Tensor of_squares(const c10::SymInt& rows, const c10::SymInt& columns, const at::TensorOptions& options, bool padded) {
  if (!padded) return at::empty_symint({rows, columns}, options);
  const bool exact = !columns.is_symbolic() && columns.expect_int() % 4 == 0;
  const at::SymDimVector sizes{rows, rounded_up(columns, 4)};
  return exact ? at::empty_symint(sizes, options) : at::ones_symint(sizes, options);
}

Quantized allocate(TensorList xs, By by, Wanted wanted, const Tensor& given) {
  c10::SymInt rows = 0;
  for (const Tensor& x : xs) rows = rows + c10::multiply_integers(x.sym_sizes().slice(0, x.dim() - 1));
  const auto n = xs[0].sym_sizes().back();
  const auto written = wanted.padded && by != By::squares ? rounded_up(rows, kBlock) : rows;
  const auto e4m3 = xs[0].options().dtype(at::kFloat8_e4m3fn).memory_format(at::MemoryFormat::Contiguous);
  const auto fp32 = xs[0].options().dtype(at::kFloat);
  Quantized out;
  if (wanted.q) out.q = at::empty_symint({written, n}, e4m3);
  if (wanted.q_t) out.q_t = at::empty_symint({n, written}, e4m3);
  if (by == By::tensor) {
    out.scale = out.scale_t = given.defined() ? given : at::empty({1}, fp32);
  } else if (by == By::rows) {
    if (wanted.q) out.scale = by_columns(written, blocks_of(n), fp32);
    if (wanted.q_t) out.scale_t = by_columns(n, blocks_of(written), fp32);
  } else {
    if (wanted.q) out.scale = of_squares(blocks_of(rows), blocks_of(n), fp32, wanted.padded);
    if (wanted.q_t) out.scale_t = of_squares(blocks_of(n), blocks_of(rows), fp32, wanted.padded);
  }
  return out;
}

void check(const char* op, TensorList xs) {
  for (const Tensor& x : xs) core::check_activation(op, "x", x);
}

/// Whether there is nothing to compute: scales of no numbers are 1.
bool is_empty(const Quantized& out, const Tensor& given) {
  if ((out.q.defined() ? out.q : out.q_t).numel() != 0) return false;
  for (const Tensor& scale : {out.scale, out.scale_t}) {
    if (scale.defined() && !given.defined()) scale.fill_(1);
  }
  return true;
}

// ---- CPU

/// Zeros up to these sizes.
Tensor zero_padded(const Tensor& x, int64_t rows, int64_t n) {
  return at::constant_pad_nd(x.contiguous(), {0, n - x.size(1), 0, rows - x.size(0)});
}

int64_t up(int64_t n) { return rounded_up(n, kBlock).expect_int(); }

/// Of a matrix: q and its scales, whose memory is larger where they are padded.
void quantize_matrix(const Tensor& q, const Tensor& scale, const Tensor& x, By by, bool given) {
  q.view(at::kByte).zero_();
  const int64_t rows = by == By::squares ? up(x.size(0)) : x.size(0), n = by == By::tensor ? x.size(1) : up(x.size(1));
  const int64_t down = rows / kBlock, across = n / kBlock;
  Tensor numbers = zero_padded(x, rows, n);
  if (by == By::rows) numbers = numbers.view({rows * across, kBlock});
  if (by == By::tensor) numbers = numbers.reshape({1, -1});
  if (by == By::squares)
    numbers = numbers.view({down, kBlock, across, kBlock}).transpose(1, 2).reshape({down * across, kBlock * kBlock});
  Tensor found = at::empty(numbers.sizes(), q.options());
  Tensor scales = given ? scale : at::empty({numbers.size(0), 1}, scale.options());
  rows::quantize_rows_of(found, scales, numbers, given);
  if (by == By::squares) found = found.view({down, across, kBlock, kBlock}).transpose(1, 2).reshape({rows, n});
  const auto part = [](const Tensor& t, int64_t i, int64_t j) { return t.narrow(0, 0, i).narrow(1, 0, j); };
  part(q, x.size(0), x.size(1)).copy_(part(found.view({rows, n}), x.size(0), x.size(1)));
  if (given) return;
  scale.fill_(1);
  if (by == By::tensor) scale.copy_(scales.view({1}));
  if (by == By::rows) part(scale, rows, across).copy_(scales.view({rows, across}));
  if (by == By::squares) part(scale, down, across).copy_(scales.view({down, across}));
}

// ---- CUDA

using e4m3::Part;

template <class Args>
void pass(const Part& part, Args& args) {
  args.x = core::address(part.x);
  args.rows = int32_t(part.walk.rows);
  args.n = int32_t(part.walk.n);
  args.x_stride = part.walk.strides[1].inner;
}

/// The largest magnitudes of what each program has seen.
Tensor tensor_peaks(const char* op, const std::vector<Part>& parts) {
  using K = kernels::tensor_peaks;
  std::vector<Tensor> peaks;
  for (const Part& part : parts) {
    const auto& [x, walk, first] = part;
    K::Args args{};
    pass(part, args);
    const auto choice = core::choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(core::dtype_of(x))));
    const int64_t programs = core::persistent_programs(x.device(), core::tiles_of(choice.config, walk), 8);
    peaks.push_back(at::empty({programs}, x.options().dtype(at::kInt)));
    args.peaks = core::address(peaks.back());
    core::launch(op, x.device(), choice, {uint32_t(programs)}, args);
  }
  return peaks.size() == 1 ? peaks[0] : at::cat(peaks);
}

/// written: rows of the results.
template <class K>
void launch_tiles(const char* op, const Quantized& out, const Part& part, int64_t written, By by, const Tensor& peaks) {
  const auto& [x, walk, first] = part;
  const int64_t pitch = out.q_t.defined() ? out.q_t.size(1) : 0;
  typename K::Args args{
      .written = int32_t(written),
      .has_q = out.q.defined(),
      .pitch = int32_t(pitch),
      .count = by == By::squares ? -1 : 0};
  pass(part, args);
  Tensor q, q_t, scale = out.scale, scale_t = out.scale_t;
  // Rows of memory are columns of scales by rows.
  const int along = by == By::rows ? 1 : 0;
  if (out.q.defined()) {
    q = out.q.narrow(0, first, written);
    if (by != By::tensor) args.scale_pitch = int32_t(scale.stride(along));
    if (by == By::squares && first != 0) scale = scale.narrow(0, first / kBlock, blocks_of(written).expect_int());
    if (by == By::rows && first != 0) scale = scale.narrow(0, first, written);
  }
  if (out.q_t.defined()) {
    q_t = out.q_t.narrow(1, first, written);
    if (by != By::tensor) args.scale_t_pitch = int32_t(scale_t.stride(along));
    if (by != By::tensor && first != 0) scale_t = scale_t.narrow(1, first / kBlock, blocks_of(written).expect_int());
  }
  args.q = core::address(q);
  args.q_t = core::address(q_t);
  args.scale = core::address(scale);
  args.scale_t = core::address(scale_t);
  if (peaks.defined()) {
    args.peaks = core::address(peaks);
    args.count = int32_t(peaks.size(0));
  }
  // Results have 8 bits, so their sizes must be multiples of 16. The table asks for multiples of 8.
  auto checked = args;
  if (((walk.n | pitch | (pitch ? written : 0)) & 15) != 0) checked.n = 1;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)), by != By::rows, 0);
  const auto choice = core::choose<K>(walk.n, checked, point);
  const int64_t tiles =
      int64_t(core::programs_for(written, choice.config.BLOCK_M)) * core::programs_for(walk.n, choice.config.BLOCK_N);
  core::launch(op, x.device(), choice, {uint32_t(tiles)}, args);
}

Tensors matrices_of(TensorList xs) {
  Tensors out;
  for (const Tensor& x : xs) out.push_back(core::as_matrix(x));
  return out;
}

}  // namespace

Quantized Cpu::quantize(const char* op, TensorList xs, By by, Wanted wanted, const Tensor& scale) {
  check(op, xs);
  runtime::count_cpu_call();
  Quantized out = allocate(xs, by, wanted, scale);
  if (is_empty(out, scale)) return out;
  const Tensors matrices = matrices_of(xs);
  const Tensor x = matrices.size() == 1 ? matrices[0] : at::cat(matrices);
  if (wanted.q) quantize_matrix(out.q, out.scale, x, by, scale.defined());
  if (wanted.q_t) quantize_matrix(out.q_t, out.scale_t, x.t(), by, scale.defined());
  return out;
}

Quantized Cuda::quantize(const char* op, TensorList xs, By by, Wanted wanted, const Tensor& scale) {
  check(op, xs);
  c10::DeviceGuard guard(xs[0].device());
  Quantized out = allocate(xs, by, wanted, scale);
  if (is_empty(out, scale)) return out;
  const auto parts = parts_of(op, matrices_of(xs), wanted.q ? out.q : out.q_t);
  Tensor peaks;
  if (by == By::tensor && !scale.defined()) peaks = tensor_peaks(op, parts);
  const bool converts = core::is_for<kernels::quantize_tiles_e4m3>(xs[0].device());
  const int64_t all = wanted.q ? out.q.size(0) : out.q_t.size(1);
  for (const Part& part : parts) {
    // The last part has the padding.
    const int64_t written = &part == &parts.back() ? all - part.first : part.walk.rows;
    if (converts)
      launch_tiles<kernels::quantize_tiles_e4m3>(op, out, part, written, by, peaks);
    else
      launch_tiles<kernels::quantize_tiles>(op, out, part, written, by, peaks);
  }
  return out;
}

Quantized Meta::quantize(const char* op, TensorList xs, By by, Wanted wanted, const Tensor& scale) {
  check(op, xs);
  return allocate(xs, by, wanted, scale);
}

}  // namespace liger::gemm::e4m3::blocks
