// quantize_blocks(x, block): e4m3 with one fp32 scale per 128 numbers of a row, or per 128 x 128.
//
// x: (..., n) of any strides, T rows. A scale is amax / 448, of zeros 1; q = x * (1 / scale). One launch writes
// rows, and for GEMMs the transposed copy; with one scale for all, another launch finds it first.

#include "ops/fp8/quantize_blocks.h"

#include "core/cpu/loops.h"
#include "core/cuda.h"
#include "core/rows.h"
#include "kernels/quantize_blocks.h"
#include "ops/fp8/quantize.h"

namespace liger::ops::quantize_blocks {
namespace {

using at::Tensor;
using at::TensorList;

c10::SymInt blocks_of(const c10::SymInt& n, int64_t block = kBlock) { return (n + (block - 1)) / block; }
c10::SymInt rounded_up(const c10::SymInt& n, int64_t multiple) { return blocks_of(n, multiple) * multiple; }

struct Sizes {
  c10::SymInt rows, n, written;
};

Sizes sizes_of(TensorList xs, By by, bool padded) {
  Sizes out{0, xs[0].sym_sizes().back(), 0};
  for (const Tensor& x : xs) out.rows = out.rows + c10::multiply_integers(x.sym_sizes().slice(0, x.dim() - 1));
  out.written = padded && by != By::squares ? rounded_up(out.rows, kBlock) : out.rows;
  return out;
}

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
  const auto [rows, n, written] = sizes_of(xs, by, wanted.padded);
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
  quantize_rows::quantize_rows_of(found, scales, numbers, given);
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

/// A matrix, of which rows of the results from `first` on come. written: how many of them.
struct Part {
  Tensor x;
  core::Rows<2> walk;
  int64_t first, written;
};

template <class Args>
void set_rows(Args& args, const Part& part) {
  args.x = core::address(part.x);
  args.rows = int32_t(part.walk.rows), args.n = int32_t(part.walk.n), args.x_stride = part.walk.strides[1].inner;
}

bool is_aligned(const Part& part) { return quantize::is_aligned(part.x, part.walk, part.first); }

template <class K>
int64_t tiles_of(const typename K::Config& config, int64_t rows, int64_t n) {
  return (rows + config.BLOCK_M - 1) / config.BLOCK_M * ((n + config.BLOCK_N - 1) / config.BLOCK_N);
}

/// The largest magnitudes of what each program has seen.
Tensor tensor_peaks(const char* op, const std::vector<Part>& parts) {
  using K = kernels::tensor_peaks;
  std::vector<Tensor> peaks;
  for (const Part& part : parts) {
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(part.x)));
    const auto& config = runtime::first_fit<K>(part.walk.n, is_aligned(part), point);
    const int64_t tiles = tiles_of<K>(config, part.walk.rows, part.walk.n);
    const int64_t programs = core::persistent_programs(part.x.device(), tiles, 8);
    peaks.push_back(at::empty({programs}, part.x.options().dtype(at::kInt)));
    K::Args args{};
    args.peaks = core::address(peaks.back());
    set_rows(args, part);
    core::launch<K>(op, part.x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  }
  return peaks.size() == 1 ? peaks[0] : at::cat(peaks);
}

template <class K>
void launch_tiles(const char* op, const Quantized& out, const Part& part, By by, const Tensor& peaks) {
  const auto& [x, walk, first, written] = part;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)), by == By::rows ? 0 : 1, 0);
  const int64_t pitch = out.q_t.defined() ? out.q_t.size(1) : 0;
  const bool aligned = is_aligned(part) && ((walk.n | pitch | (pitch ? written : 0)) & 15) == 0;
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point);
  typename K::Args args{};
  set_rows(args, part);
  args.written = int32_t(written), args.has_q = out.q.defined(), args.pitch = int32_t(pitch);
  Tensor q, q_t, scale = out.scale, scale_t = out.scale_t;
  // Rows of memory are columns of scales by rows.
  const int along = by == By::rows ? 1 : 0;
  if (out.q.defined()) {
    q = out.q.narrow(0, first, written);
    args.q = core::address(q);
    if (by != By::tensor) args.scale_pitch = int32_t(scale.stride(along));
    if (by == By::squares && first != 0) scale = scale.narrow(0, first / kBlock, blocks_of(written).expect_int());
    if (by == By::rows && first != 0) scale = scale.narrow(0, first, written);
  }
  if (out.q_t.defined()) {
    q_t = out.q_t.narrow(1, first, written);
    args.q_t = core::address(q_t);
    if (by != By::tensor) args.scale_t_pitch = int32_t(scale_t.stride(along));
    if (by != By::tensor && first != 0) scale_t = scale_t.narrow(1, first / kBlock, blocks_of(written).expect_int());
  }
  if (scale.defined()) args.scale = core::address(scale);
  if (scale_t.defined()) args.scale_t = core::address(scale_t);
  if (by == By::squares) args.count = -1;
  if (peaks.defined()) args.peaks = core::address(peaks), args.count = int32_t(peaks.size(0));
  core::launch<K>(
      op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(tiles_of<K>(config, written, walk.n))}, args);
}

std::vector<Part> parts_of(const char* op, TensorList xs, const Tensor& result, int64_t written) {
  std::vector<Part> parts;
  int64_t first = 0;
  for (const Tensor& x : xs) {
    Tensor matrix = core::as_matrix(x);
    const int64_t rows = matrix.size(0);
    if (rows) {
      // Only its shape and layout are used.
      Tensor lead = result.view({-1}).narrow(0, 0, matrix.numel()).view(matrix.sizes());
      const auto walk = core::walk_rows<2>(op, {&lead, &matrix});
      parts.push_back({std::move(matrix), walk, first, rows});
    }
    first += rows;
  }
  parts.back().written = written - parts.back().first;
  return parts;
}

// ---- The operator

struct QuantizeBlocks
    : quantize::Operator<QuantizeBlocks, std::tuple<Tensor, Tensor>(const Tensor&, c10::string_view)> {
  static constexpr const char* kOp = "quantize_blocks";
  static constexpr const char* kSchema = schemas::quantize_blocks;
  using Cpu = quantize_blocks::Cpu;
  using Cuda = quantize_blocks::Cuda;
  using Meta = quantize_blocks::Meta;

  template <class Device>
  static std::tuple<Tensor, Tensor> run(bool, const Tensor& x, std::string_view block) {
    LIGER_CHECK(block == "1x128" || block == "128x128", kOp, "block", "be '1x128' or '128x128'", "'", block, "'");
    const By by = block == "1x128" ? By::rows : By::squares;
    Quantized out = Device::quantize(kOp, {x}, by, {true, false, false});
    at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    Tensor q = at::_unsafe_view_symint(out.q, sizes);
    if (by == By::squares) return {std::move(q), std::move(out.scale)};
    sizes.pop_back();
    sizes.insert(sizes.begin(), out.scale.sym_size(1));
    return {std::move(q), at::_unsafe_view_symint(out.scale.t(), sizes).movedim(0, -1)};
  }
};

}  // namespace

Quantized Cpu::quantize(const char* op, TensorList xs, By by, Wanted wanted, const Tensor& scale) {
  check(op, xs);
  runtime::count_cpu_call();
  Quantized out = allocate(xs, by, wanted, scale);
  if (is_empty(out, scale)) return out;
  std::vector<Tensor> matrices;
  for (const Tensor& x : xs) matrices.push_back(core::as_matrix(x));
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
  const auto parts = parts_of(op, xs, wanted.q ? out.q : out.q_t, sizes_of(xs, by, wanted.padded).written.expect_int());
  Tensor peaks;
  if (by == By::tensor && !scale.defined()) peaks = tensor_peaks(op, parts);
  const bool converts = core::is_for<kernels::quantize_tiles_e4m3>(xs[0].device());
  for (const Part& part : parts) {
    if (converts)
      launch_tiles<kernels::quantize_tiles_e4m3>(op, out, part, by, peaks);
    else
      launch_tiles<kernels::quantize_tiles>(op, out, part, by, peaks);
  }
  return out;
}

Quantized Meta::quantize(const char* op, TensorList xs, By by, Wanted wanted, const Tensor& scale) {
  check(op, xs);
  return allocate(xs, by, wanted, scale);
}

LIGER_OPERATOR(QuantizeBlocks)

}  // namespace liger::ops::quantize_blocks
