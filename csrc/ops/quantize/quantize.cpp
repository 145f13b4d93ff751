// quantize_rows(x), quantize_columns(x), quantize_both(x): matrices in e4m3 with one fp32 scale per row, or per column
// of x in a transposed copy.
//
// x: (..., n) of any strides, T rows. Results are contiguous. A scale is amax / 448, of zeros 1; q = x * (1 / scale).
// Launches: of rows one; of columns three, the first of which also writes the rows where they fit into registers.

#include "gemm/e4m3/rows.h"
#include "ops/quantize/quantizer.h"

namespace liger::ops::quantize_rows {
namespace {

using at::Tensor;
using gemm::e4m3::rows::Columns;
using gemm::e4m3::rows::Quantized;

template <class Op, class Type>
struct Quantizer : quantize::Operator<Op, Type> {
  using Cpu = gemm::e4m3::rows::Cpu;
  using Cuda = gemm::e4m3::rows::Cuda;
  using Meta = gemm::e4m3::rows::Meta;
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

LIGER_OPERATOR(QuantizeRows)
LIGER_OPERATOR(QuantizeColumns)
LIGER_OPERATOR(QuantizeBoth)

}  // namespace liger::ops::quantize_rows
