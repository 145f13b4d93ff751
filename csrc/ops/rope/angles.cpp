// Checks and strides of heads and of the angles that rotate them.

#include "ops/rope/angles.h"

#include "core/checks.h"
#include "core/rows/rows.h"

namespace liger::ops::rope {
namespace {

void check_heads(const char* op, const Tensor& q, const Tensor& k) {
  core::check_activation(op, "q", q);
  LIGER_CHECK(q.dim() == 4, op, "q", "have shape (batch, heads, sequence, head size)", q.sym_sizes());
  core::check_same_device(op, "k", k, "q", q);
  core::check_dense(op, "k", k);
  LIGER_CHECK(
      k.scalar_type() == q.scalar_type(), op, "k", c10::str("have the dtype of q, ", q.scalar_type()), k.scalar_type());
  LIGER_CHECK(
      k.dim() == 4 && k.sym_size(0) == q.sym_size(0) && k.sym_size(2) == q.sym_size(2) &&
          k.sym_size(3) == q.sym_size(3),
      op, "k", c10::str("have the batch, sequence and head size of q, ", q.sym_sizes()), k.sym_sizes());
}

// columns_per_angle: 2 if an angle, perhaps complex, rotates a pair of columns; 1 if every column has its own.
void check_angles(
    const char* op, const char* name, const Tensor& angles, const Tensor& q, bool sections, int64_t columns_per_angle) {
  core::check_same_device(op, name, angles, "q", q);
  LIGER_CHECK(angles.layout() == at::kStrided, op, name, "be a dense tensor", angles.layout());
  int64_t lead = sections ? 1 : 0, dims = angles.dim() - lead;
  LIGER_CHECK(
      (dims == 2 || dims == 3) && (!sections || angles.sym_size(0) == 3), op, name,
      (sections ? "have shape (3, sequence, R) or (3, 1 or batch, sequence, R)"
                : "have shape (sequence, R) or (1 or batch, sequence, R)"),
      angles.sym_sizes());
  LIGER_CHECK(
      angles.sym_size(-2) == q.sym_size(2), op, name,
      c10::str("have one row for each of q's ", q.sym_size(2), " positions"), angles.sym_size(-2));
  LIGER_CHECK(
      dims == 2 || angles.sym_size(lead) == 1 || angles.sym_size(lead) == q.sym_size(0), op, name,
      c10::str("have a batch of 1 or ", q.sym_size(0), ", that of q"), angles.sym_size(lead));
  auto rotated = angles.sym_size(-1) * columns_per_angle;
  LIGER_CHECK(rotated % 2 == 0, op, name, "have an even last dimension", rotated);
  LIGER_CHECK(
      rotated <= q.sym_size(3), op, name, c10::str("rotate at most q's head size, ", q.sym_size(3)), rotated,
      " columns");
}

}  // namespace

void check_heads_and_angles(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin,
    const Sections& sections, const Columns& columns) {
  check_heads(op, q, k);
  if (!sin) {
    auto wanted = q.scalar_type() == at::kDouble ? at::kComplexDouble : at::kComplexFloat;
    LIGER_CHECK(cos.scalar_type() == wanted, op, "freqs_cis", c10::str("be ", wanted), cos.scalar_type());
    check_angles(op, "freqs_cis", cos, q, false, 2);
    return;
  }
  const int64_t columns_per_angle = columns.trailing ? 2 : 1;
  check_angles(op, "cos", cos, q, sections.has_value(), columns_per_angle);
  core::check_parameter_dtype(op, "cos", cos, "q", q);
  core::check_same(op, "sin", *sin, "cos", cos);
  if (sections) {
    bool fits = sections->size() == 3 && (*sections)[0] >= 0 && (*sections)[1] >= 0 && (*sections)[2] >= 0;
    LIGER_CHECK(
        fits && columns_per_angle * cos.sym_size(-1) == 2 * ((*sections)[0] + (*sections)[1] + (*sections)[2]), op,
        "mrope_section", c10::str("be three sizes that add up to ", columns_per_angle * cos.sym_size(-1), " / 2"),
        *sections);
  }
}

Angles make_angles(Tensor cos, const OptionalTensor& sin_in, const Sections& sections, const Columns& columns) {
  // One angle for a pair of columns that stay together is read as a complex number.
  const bool joins = columns.trailing && !columns.halves_out, is_complex = joins || !sin_in;
  if (!sin_in) cos = at::view_as_real(cos).flatten(-2);
  if (joins) cos = at::stack({cos, *sin_in}, -1).flatten(-2);
  Tensor sin = is_complex ? cos : *sin_in;
  bool alike = cos.stride(-1) == 1 && (is_complex || cos.strides() == sin.strides());
  if (!alike) {
    cos = cos.contiguous();
    sin = sin.contiguous();
  }
  const bool shares = columns.trailing && columns.halves_out;
  int64_t half = shares ? cos.size(-1) : cos.size(-1) / 2, lead = sections ? 1 : 0;
  Angles out{cos, sin, half};
  out.position = cos.stride(-2);
  if (cos.dim() - lead == 3 && cos.size(lead) > 1) out.batch = cos.stride(lead);
  if (sections) out.section = cos.stride(0);
  out.section_1 = sections ? (*sections)[0] : half;
  out.section_2 = sections ? (*sections)[0] + (*sections)[1] : half;
  out.is_complex = is_complex;
  out.second = shares ? 0 : columns.writes_pairs() ? 1 : half;
  out.next = columns.writes_pairs() ? 2 : 1;
  return out;
}

Tensor with_unit_columns(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : core::empty_rows_like(t).copy_(t);
}

}  // namespace liger::ops::rope
