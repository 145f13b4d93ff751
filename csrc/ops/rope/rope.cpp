// rope(q, k, cos, sin, *, interleaved, mrope_section, trailing, halves_out) -> q and k with R columns of every head
// rotated: y = x * cos + rotate(x) * sin, where rotate maps a pair (a, b) to (-b, a).
//
// q: (B, Hq, S, D), k: (B, Hk, S, D) of any strides; results and gradients keep q's and k's own dense layouts.
// cos, sin: (S, R) or (1 or B, S, R) in q's dtype or fp32, R <= D; the other columns are copied. Pairs are columns
// (i, i + R / 2), or (2 i, 2 i + 1) if interleaved. With mrope_section = [t, h, w] (multimodal positions,
// t + h + w = R / 2) cos and sin have a leading dimension of 3. The first t pairs use its index 0, the next h pairs
// index 1 and the last w pairs index 2.
//
// The first R columns are rotated. If trailing, the last R are: pairs (2 i, 2 i + 1) with cos and sin (..., R / 2), as
// in DeepSeek-V4. With halves_out, pairs (2 i, 2 i + 1) are written to columns (i, i + R / 2), as in DeepSeek-V3, and
// cos and sin are in the order of the results.
//
// rope_freqs_cis(q, k, freqs_cis) takes the angles as complex numbers cos + i sin, (S, R / 2) or (1 or B, S, R / 2).
// Its pairs are neighbouring columns, as in Llama 4.

#include "ops/rope/rope.h"

#include "core/operator.h"
#include "core/rows/rows.h"

namespace liger::ops::rope {
namespace {

constexpr const char* kOp = "rope";
constexpr const char* kComplexOp = "rope_freqs_cis";

const char* name_of(const OptionalTensor& sin) { return sin ? kOp : kComplexOp; }

struct Cpu {
  static constexpr Rotate* rotate = rotate_cpu;
};
struct Cuda {
  static constexpr Rotate* rotate = rotate_cuda;
};
struct Meta {
  static constexpr Rotate* rotate = nullptr;
};

// ---- Rotation by the angles or their inverse, into new tensors or in place

template <class Device>
void rotate_into(
    const Tensor& out_q, const Tensor& out_k, const Tensor& q, const Tensor& k, const Tensor& cos,
    const OptionalTensor& sin, const Columns& columns, const Sections& sections, bool inverse) {
  if constexpr (Device::rotate != nullptr) {
    bool in_place = out_q.is_same(q);
    const Tensor from_q = in_place ? q : with_unit_columns(q), from_k = in_place ? k : with_unit_columns(k);
    const Call call{{out_q, out_k, from_q, from_k, make_angles(cos, sin, sections, columns)}, columns, inverse};
    Device::rotate(name_of(sin), call);
  }
}

using Two = std::tuple<Tensor, Tensor>;

template <class Device>
Two rotated(
    const Tensor& q, const Tensor& k, const Tensor& cos, const OptionalTensor& sin, const Columns& columns,
    const Sections& sections) {
  check_heads_and_angles(name_of(sin), q, k, cos, sin, sections, columns);
  Tensor out_q = core::empty_rows_like(q), out_k = core::empty_rows_like(k);
  rotate_into<Device>(out_q, out_k, q, k, cos, sin, columns, sections, false);
  return {out_q, out_k};
}

// Gradients have the layouts of the inputs, whatever layouts the incoming gradients have.
struct Backward : core::Private<
                      Backward,
                      Two(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool, Sections, bool,
                          bool, c10::SymIntArrayRef, c10::SymIntArrayRef)> {
  static constexpr const char* kName = "_rope_bwd";
  static constexpr const char* kArguments =
      "dq, dk, cos, sin, interleaved, mrope_section, trailing, halves_out, q_strides, k_strides";

  template <class Device>
  static Two run(
      const Tensor& dq, const Tensor& dk, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
      Sections sections, bool trailing, bool halves_out, c10::SymIntArrayRef q_strides, c10::SymIntArrayRef k_strides) {
    const Columns columns{interleaved, trailing, halves_out};
    check_heads_and_angles(name_of(sin), dq, dk, cos, sin, sections, columns);
    Tensor out_q = at::empty_strided_symint(dq.sym_sizes(), q_strides, dq.options());
    Tensor out_k = at::empty_strided_symint(dk.sym_sizes(), k_strides, dk.options());
    rotate_into<Device>(out_q, out_k, dq, dk, cos, sin, columns, sections, true);
    return {out_q, out_k};
  }
};

struct BackwardInPlace
    : core::Private<
          BackwardInPlace, void(Tensor&, Tensor&, const Tensor&, const OptionalTensor&, bool, Sections, bool)> {
  static constexpr const char* kName = "_rope_bwd_";
  static constexpr const char* kArguments = "dq, dk, cos, sin, interleaved, mrope_section, trailing";

  template <class Device>
  static void run(
      Tensor& dq, Tensor& dk, const Tensor& cos, const OptionalTensor& sin, bool interleaved, Sections sections,
      bool trailing) {
    const Columns columns{interleaved, trailing};
    check_heads_and_angles(name_of(sin), dq, dk, cos, sin, sections, columns);
    rotate_into<Device>(dq, dk, dq, dk, cos, sin, columns, sections, true);
  }
};

struct Node : core::BackwardNode<Node, 2> {  // cos, sin
  Columns columns;
  std::vector<int64_t> sections;  // empty: none
  std::vector<c10::SymInt> q_strides, k_strides;
  const char* op = kOp;

  auto state() {
    return std::tie(columns.interleaved, columns.trailing, columns.halves_out, sections, q_strides, k_strides, op);
  }
  std::string name() const override { return op; }

  void record(
      const Two& out, const Tensor&, const Tensor&, const Tensor& cos, const OptionalTensor& sin, bool interleaved,
      const Sections& given, bool trailing, bool halves_out) {
    op = name_of(sin);
    columns = {interleaved, trailing, halves_out};
    if (given) sections = given->vec();
    const auto& [out_q, out_k] = out;
    q_strides = out_q.sym_strides().vec();
    k_strides = out_k.sym_strides().vec();
    save(cos, sin);
    connect(out_q, out_k);
  }
  void record(const Two& out, const Tensor& q, const Tensor& k, const Tensor& freqs_cis) {
    record(out, q, k, freqs_cis, std::nullopt, true, std::nullopt, false, false);
  }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dq = std::move(grads[0]), dk = std::move(grads[1]);
    bool needs_q = dq.defined() && needs(0), needs_k = dk.defined() && needs(1);
    if (!needs_q && !needs_k) return {Tensor(), Tensor()};
    Tensor cos = take(0), sin_or_none = take(1);
    OptionalTensor sin = sin_or_none.defined() ? OptionalTensor(sin_or_none) : std::nullopt;
    Sections given = sections.empty() ? Sections() : Sections(sections);
    const auto& [interleaved, trailing, halves_out] = columns;
    // Gradients of halves go to other columns, which others still read.
    if (!halves_out && needs_q && needs_k && may_overwrite(dq, dq) && may_overwrite(dk, dk) &&
        dq.sym_strides().equals(q_strides) && dk.sym_strides().equals(k_strides)) {
      BackwardInPlace::call(dq, dk, cos, sin, interleaved, given, trailing);
      return {dq, dk};
    }
    // A gradient that is not needed is replaced by a tensor without heads.
    if (!needs_q) dq = dk.narrow(1, 0, 0);
    if (!needs_k) dk = dq.narrow(1, 0, 0);
    auto [out_q, out_k] =
        Backward::call(dq, dk, cos, sin, interleaved, given, trailing, halves_out, q_strides, k_strides);
    return {needs_q ? out_q : Tensor(), needs_k ? out_k : Tensor()};
  }
};

// ---- The operators

/// What both have in common. Angles have no gradients.
template <class Op, class Type>
struct Rotation : core::Operator<Op, Type> {
  using Edges = core::Positions<0, 1>;
  using Node = rope::Node;
  using Cpu = rope::Cpu;
  using Cuda = rope::Cuda;
  using Meta = rope::Meta;
};

struct Rope
    : Rotation<Rope, Two(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, Sections, bool, bool)> {
  static constexpr const char* kOp = rope::kOp;
  static constexpr const char* kSchema = schemas::rope;
  using Constants = core::Positions<2, 3>;
  using Privates = core::Privates<Backward, BackwardInPlace>;

  template <class Device>
  static Two run(
      bool, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, Sections sections,
      bool trailing, bool halves_out) {
    return rotated<Device>(q, k, cos, sin, {interleaved, trailing, halves_out}, sections);
  }

  // Multiplication promotes mixed dtypes, with autocast and without. This operator requires one dtype for q and k, and
  // angles in that dtype or float32.
  struct Autocast {
    static constexpr bool kCpu = true, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      auto& [q, k, cos, sin, interleaved, sections, trailing, halves_out] = arguments;
      const auto wider = at::promote_types(q.scalar_type(), k.scalar_type());
      q = q.to(wider), k = k.to(wider);
      for (Tensor* t : {&cos, &sin}) {
        if (t->scalar_type() != wider) *t = t->to(at::kFloat);
      }
    }
  };
};

struct RopeFreqsCis : Rotation<RopeFreqsCis, Two(const Tensor&, const Tensor&, const Tensor&)> {
  static constexpr const char* kOp = kComplexOp;
  static constexpr const char* kSchema = schemas::rope_freqs_cis;
  using Constants = core::Positions<2>;

  template <class Device>
  static Two run(bool, const Tensor& q, const Tensor& k, const Tensor& freqs_cis) {
    return rotated<Device>(q, k, freqs_cis, std::nullopt, {/*interleaved=*/true}, std::nullopt);
  }
};

}  // namespace

LIGER_OPERATOR(Rope)
LIGER_OPERATOR(RopeFreqsCis)

}  // namespace liger::ops::rope
