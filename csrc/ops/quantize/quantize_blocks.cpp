// quantize_blocks(x, block): e4m3 with one fp32 scale per 128 numbers of a row, or per 128 x 128.
//
// x: (..., n) of any strides, T rows. A scale is amax / 448, of zeros 1; q = x * (1 / scale). One launch writes
// rows, and for GEMMs the transposed copy; with one scale for all, another launch finds it first.

#include "gemm/e4m3/blocks.h"
#include "ops/quantize/quantizer.h"

namespace liger::ops::quantize_blocks {
namespace {

using at::Tensor;
using gemm::e4m3::blocks::By;
using gemm::e4m3::blocks::Quantized;

struct QuantizeBlocks
    : quantize::Operator<QuantizeBlocks, std::tuple<Tensor, Tensor>(const Tensor&, c10::string_view)> {
  static constexpr const char* kOp = "quantize_blocks";
  static constexpr const char* kSchema = schemas::quantize_blocks;
  using Cpu = gemm::e4m3::blocks::Cpu;
  using Cuda = gemm::e4m3::blocks::Cuda;
  using Meta = gemm::e4m3::blocks::Meta;

  template <class Device>
  static std::tuple<Tensor, Tensor> run(bool, const Tensor& x, std::string_view block) {
    LIGER_CHECK(block == "1x128" || block == "128x128", kOp, "block", "be '1x128' or '128x128'", "'", block, "'");
    core::check_rows(kOp, "x", x);
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

LIGER_OPERATOR(QuantizeBlocks)

}  // namespace liger::ops::quantize_blocks
