// fp8_linear(x, weight, bias, recipe) = F.linear of numbers in e4m3: rows of x by rows of the weight, in backward rows
// of dy by columns of the weight, and columns of dy by columns of x. fp8_projections takes several weights as if they
// were stacked, and computes both.
//
// x: (..., n), T rows; weight: (m, n); dy: (..., m). A GEMM takes both operands with the summed dimension last, (M, K)
// and (N, K), and their scales (M, 1) and (N, 1). cuBLAS and CUTLASS compute them through aten::_scaled_mm.
//
// recipe "rows_hp": the weight's gradient is a GEMM of x and dy as they are. "tensor": one scale for all rows and
// columns. "blocks": one for 128 numbers along the summed dimension, of weights for 128 x 128. Nothing is kept between
// calls but what autograd saves: the weights and their columns' scales, and x or its transposed copy if a weight takes
// a gradient.

#include <ATen/BlasBackend.h>

#include <cstdlib>
#include <string_view>

#include "core/cuda/launch.h"
#include "core/operator.h"
#include "core/rows/rows.h"
#include "gemm/e4m3/rows.h"
#include "gemm/e4m3/blocks.h"
#include "runtime/status.h"

namespace liger::ops::fp8_linear {
namespace {

using at::Tensor;
using at::TensorList;
using gemm::e4m3::blocks::By;
using gemm::e4m3::rows::Columns;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kProjections = "fp8_projections";
constexpr const char* kBackward = "fp8_linear backward";
constexpr int64_t kMultiple = 16;  // of sizes, for cuBLAS
constexpr int kFirstCapability = 89, kHopper = 90;

enum class Recipe { rows, rows_hp, tensor, blocks };

Recipe recipe_of(const char* op, std::string_view recipe) {
  if (recipe == "rows") return Recipe::rows;
  if (recipe == "rows_hp") return Recipe::rows_hp;
  if (recipe == "tensor") return Recipe::tensor;
  LIGER_CHECK(recipe == "blocks", op, "recipe", "be 'rows', 'rows_hp', 'tensor' or 'blocks'", "'", recipe, "'");
  return Recipe::blocks;
}

// ---- GEMMs: (M, K) by (N, K), quantised

/// What has a scale of its own: a row, 128 numbers of a row, 128 x 128, or all.
enum class Scales { rows, blocks, squares, tensor };

struct Operand {
  Tensor q, scale;
  Scales scales = Scales::rows;

  /// Rows from `first` on.
  Operand part(const c10::SymInt& first, const c10::SymInt& count) const {
    const Tensor rows = q.narrow_symint(0, first, count);
    if (scales == Scales::tensor) return {rows, scale, scales};
    return {rows, scale.narrow_symint(0, first, count), scales};
  }
};

struct Cpu {
  using Quantizer = gemm::e4m3::rows::Cpu;
  using Blocks = gemm::e4m3::blocks::Cpu;

  static void check(const char*, const Tensor&, Recipe) {}

  /// The scale of each number, or of each row.
  static Tensor scale_of_each(const Operand& t) {
    const int64_t rows = t.q.size(0), n = t.q.size(1), block = gemm::e4m3::blocks::kBlock;
    Tensor out = t.scale;
    if (t.scales == Scales::squares) out = out.repeat_interleave(block, 0).narrow(0, 0, rows);
    const bool by_blocks = t.scales == Scales::squares || t.scales == Scales::blocks;
    return by_blocks ? out.repeat_interleave(block, 1).narrow(1, 0, n) : out;
  }

  static Tensor multiply(
      const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool /*is_over_rows*/) {
    const auto dtype = core::compute_type(like);
    auto widened = [&](const Operand& t) { return t.q.to(dtype) * scale_of_each(t).to(dtype); };
    Tensor y = at::mm(widened(a), widened(b).t());
    if (bias.defined()) y.add_(bias.to(dtype));
    return y.to(like.scalar_type());
  }
};

/// Adds to the sum so far without fp32's digits, which costs long sums of one sign several percent: docs/fp8.md.
bool fast_accumulation() {
  static const bool fast = [] {
    const char* value = std::getenv("LIGER_OPS_FP8_FAST_ACCUMULATION");
    return !value || std::string_view(value) != "0";
  }();
  return fast;
}

/// With zeros, up to a multiple of kMultiple columns.
Tensor padded(const Tensor& q) {
  const int64_t missing = (kMultiple - q.size(1) % kMultiple) % kMultiple;
  return missing ? at::constant_pad_nd(q.view(at::kByte), {0, missing}).view(q.scalar_type()) : q;
}

struct Cuda {
  using Quantizer = gemm::e4m3::rows::Cuda;
  using Blocks = gemm::e4m3::blocks::Cuda;

  static void check(const char* op, const Tensor& x, Recipe recipe) {
    std::string error;
    const auto* info = runtime::device_info(x.device().index(), error);
    TORCH_CHECK(info, op, ": ", error);
    const auto major = info->capability / 10, minor = info->capability % 10;
    LIGER_CHECK(
        info->capability >= kFirstCapability, op, "x",
        "be on a GPU with FP8 tensor cores, compute capability 8.9 or newer", info->name, ", ", major, ".", minor);
    LIGER_CHECK(
        recipe != Recipe::blocks || info->capability == kHopper, op, "x",
        "be on a GPU of compute capability 9.0 with the recipe 'blocks'", info->name, ", ", major, ".", minor);
  }

  /// cuBLAS reads scales and biases 16 bytes at a time, one number after the other. A bias may have any strides, and
  /// those of a batch's samples begin anywhere, like their scales; blocks and squares are padded.
  static Tensor aligned(const Tensor& t) {
    const Tensor dense = t.contiguous();
    return uintptr_t(core::address(dense)) % 16 == 0 ? dense : dense.clone();
  }

  static Tensor multiply(
      const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool is_over_rows) {
    const Tensor left = padded(a.q), right = padded(b.q);
    // A batch may have any number of rows, so a sum over them is never fast.
    const bool fast = !is_over_rows && fast_accumulation(), half = like.scalar_type() != at::kFloat;
    const auto added = bias.defined() ? OptionalTensor(aligned(bias)) : std::nullopt;
    auto scaled = [&](at::ScalarType dtype, const OptionalTensor& bias) {
      const Tensor scale = a.scales == Scales::rows ? aligned(b.scale).t() : aligned(b.scale);
      return at::_scaled_mm(left, right.t(), aligned(a.scale), scale, bias, {}, dtype, fast);
    };
    if (a.scales == Scales::tensor && half) return scaled(like.scalar_type(), added);
    if (a.scales == Scales::rows && like.scalar_type() == at::kBFloat16) return scaled(at::kBFloat16, added);
    Tensor y;
    if (a.scales == Scales::tensor) {
      y = scaled(at::kFloat, {});
    } else if (a.scales == Scales::blocks) {
      const bool direct = like.scalar_type() == at::kBFloat16 && !bias.defined();
      y = multiply_blocks(left, right, a.scale, b, direct ? at::kBFloat16 : at::kFloat);
    } else {
      // Scales of rows come with results in bfloat16 alone.
      const Tensor one = at::ones({}, a.scale.options());
      y = at::_scaled_mm(left, right.t(), one, one, {}, {}, at::kFloat, fast);
      y.mul_(a.scale).mul_(b.scale.t());
    }
    if (bias.defined()) y.add_(bias);
    return y.to(like.scalar_type());
  }

  /// The older _scaled_mm guesses from the scales' shapes, and does not know that cuBLAS pads those of squares.
  static Tensor multiply_blocks(
      const Tensor& left, const Tensor& right, const Tensor& scale, const Operand& b, at::ScalarType dtype) {
    const int64_t blocks = int64_t(at::blas::ScalingType::BlockWise1x128);
    const int64_t squares = int64_t(at::blas::ScalingType::BlockWise128x128);
    const int64_t plain = int64_t(at::blas::SwizzleType::NO_SWIZZLE);
    const bool is_square = b.scales == Scales::squares;
    // Of blocks, with neighbouring rows side by side and without a gap. torch checks strides of single columns too.
    auto laid_out = [](const Tensor& t) {
      const int64_t rows = t.size(0), columns = t.size(1);
      if (t.stride(0) == 1 && (columns == 1 || t.stride(1) == rows)) return t.as_strided({rows, columns}, {1, rows});
      return at::empty_strided({rows, columns}, {1, rows}, t.options()).copy_(t);
    };
    return at::_scaled_mm_v2(
        left, right.t(), {laid_out(scale)}, {blocks}, {plain}, {is_square ? b.scale.t() : laid_out(b.scale)},
        {is_square ? squares : blocks}, {plain}, {}, dtype);
  }
};

struct Meta {
  using Quantizer = gemm::e4m3::rows::Meta;
  using Blocks = gemm::e4m3::blocks::Meta;

  static void check(const char*, const Tensor&, Recipe) {}
};

template <class Device>
Tensor product(const Operand& a, const Operand& b, const Tensor& bias, const Tensor& like, bool is_over_rows = false) {
  const auto m = a.q.sym_size(0), n = b.q.sym_size(0);
  if constexpr (std::is_same_v<Device, Meta>) {
    return at::empty_symint({m, n}, like.options());
  } else {
    if (m == 0 || n == 0 || a.q.size(1) == 0) {
      const Tensor y = at::zeros({m.expect_int(), n.expect_int()}, like.options());
      return bias.defined() ? y + bias : y;
    }
    return Device::multiply(a, b, bias, like, is_over_rows);
  }
}

// ---- Operands

/// A matrix and its transposed copy, if they are wanted.
struct Pair {
  Operand rows, columns;
};

template <class Device>
Pair pair_of_blocks(
    const char* op, TensorList ts, bool is_weight, gemm::e4m3::blocks::Wanted wanted, Recipe recipe,
    const Tensor& scale = {}) {
  const bool tensor = recipe == Recipe::tensor;
  const auto by = tensor ? By::tensor : is_weight ? By::squares : By::rows;
  const auto scales = tensor ? Scales::tensor : is_weight ? Scales::squares : Scales::blocks;
  auto found = Device::Blocks::quantize(op, ts, by, wanted, scale);
  return {{found.q, found.scale, scales}, {found.q_t, found.scale_t, scales}};
}

bool by_rows(Recipe recipe) { return recipe == Recipe::rows || recipe == Recipe::rows_hp; }

/// Of t, a matrix. Its columns are over tokens.
template <class Device>
Pair pair_of(const char* op, const Tensor& t, bool rows, bool columns, Recipe recipe) {
  if (!by_rows(recipe)) return pair_of_blocks<Device>(op, {t}, false, {rows, columns, true}, recipe);
  const auto found = Device::Quantizer::quantize(op, {t}, rows, columns ? Columns::all : Columns::none);
  return {{found.q, found.scale}, {found.q_t, found.scale_t}};
}

/// The rows of weights, and of their columns what columns_of_weights needs.
template <class Device>
Pair rows_of_weights(const char* op, TensorList weights, bool wants_columns, Recipe recipe) {
  if (by_rows(recipe)) {
    const auto columns = wants_columns ? Columns::scales : Columns::none;
    const auto found = Device::Quantizer::quantize(op, weights, true, columns);
    return {{found.q, found.scale.view_symint({-1, 1})}, {{}, found.scale_t}};
  }
  Pair out = pair_of_blocks<Device>(op, weights, true, {true, false, recipe == Recipe::blocks}, recipe);
  if (recipe == Recipe::tensor && wants_columns) out.columns.scale = out.rows.scale;
  return out;
}

template <class Device>
Operand columns_of_weights(const char* op, TensorList weights, const Tensor& scale, Recipe recipe) {
  if (by_rows(recipe)) {
    const auto found = Device::Quantizer::with_scales(op, weights, scale);
    return {found.q_t, found.scale_t};
  }
  const bool blocks = recipe == Recipe::blocks;
  return pair_of_blocks<Device>(op, weights, true, {false, true, blocks}, recipe, blocks ? Tensor() : scale).columns;
}

/// y with the rows of x, without those of padding. Not a view, so that its memory can be used again.
template <class Device>
Tensor in_rows_of(const Tensor& x, const Tensor& y, Recipe recipe) {
  at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  const auto rows = c10::multiply_integers(x.sym_sizes().slice(0, x.dim() - 1));
  sizes.back() = y.sym_sizes().back();
  if (by_rows(recipe)) return at::_unsafe_view_symint(y, sizes);
  // torch cannot prove that a rounded number of rows is no smaller.
  if constexpr (std::is_same_v<Device, Meta>) return at::empty_symint(sizes, y.options());
  return at::_unsafe_view_symint(y.narrow_symint(0, 0, rows), sizes);
}

// ---- Checks

void check_multiple(const char* op, const std::string& name, const c10::SymInt& size, Recipe recipe) {
  const bool blocks = recipe == Recipe::blocks;
  const int64_t multiple = blocks ? gemm::e4m3::blocks::kBlock : kMultiple;
  const char* why = blocks ? " with the recipe 'blocks'" : "";
  LIGER_CHECK(size % multiple == 0, op, name, c10::str("be a multiple of ", multiple, why), size);
}

void check_parameter(const char* op, const std::string& name, const Tensor& t, const Tensor& x) {
  core::check_dense(op, name.c_str(), t);
  core::check_same_device(op, name.c_str(), t, "x", x);
  LIGER_CHECK(
      t.scalar_type() == x.scalar_type(), op, name, c10::str("have the dtype of x, ", x.scalar_type()),
      t.scalar_type());
}

void check_weight(const char* op, const std::string& name, const Tensor& weight, const Tensor& x, Recipe recipe) {
  check_parameter(op, name, weight, x);
  LIGER_CHECK(weight.dim() == 2, op, name, "have two dimensions", weight.sym_sizes());
  const auto n = x.sym_sizes().back();
  LIGER_CHECK(
      weight.sym_size(1) == n, op, name, c10::str("have shape [features, ", n, "], the last dimension of x"),
      weight.sym_sizes());
  check_multiple(op, "features of " + name, weight.sym_size(0), recipe);
}

void check_bias(const char* op, const std::string& name, const Tensor& bias, const c10::SymInt& m, const Tensor& x) {
  check_parameter(op, name, bias, x);
  LIGER_CHECK(
      bias.dim() == 1 && bias.sym_size(0) == m, op, name, c10::str("have shape [", m, "], one value per feature"),
      bias.sym_sizes());
}

void check_x(const char* op, const Tensor& x, Recipe recipe) {
  core::check_activation(op, "x", x);
  check_multiple(op, "features of x", x.sym_sizes().back(), recipe);
}

void check_lists(const char* op, const Tensor& x, TensorList weights, TensorList biases, Recipe recipe) {
  check_x(op, x, recipe);
  LIGER_CHECK(!weights.empty(), op, "weights", "have an entry", 0);
  LIGER_CHECK(
      biases.empty() || biases.size() == weights.size(), op, "biases",
      c10::str("be empty or have as many entries as weights, ", weights.size()), biases.size());
  for (size_t i = 0; i < weights.size(); ++i) check_weight(op, c10::str("weights[", i, "]"), weights[i], x, recipe);
  for (size_t i = 0; i < biases.size(); ++i) {
    check_bias(op, c10::str("biases[", i, "]"), biases[i], weights[i].sym_size(0), x);
  }
}

Tensor stacked(TensorList biases) {
  if (biases.empty()) return {};
  return biases.size() == 1 ? biases[0] : at::cat(biases);
}

// ---- Private operators

/// y; what the weights' gradients need of x, if one is wanted and not with the recipe "rows_hp"; the scales that the
/// gradient of x needs of the weights.
template <class Device>
Four compute(
    const char* op, const Tensor& x, TensorList weights, TensorList biases, bool wants_x, bool wants_weights,
    Recipe recipe) {
  Device::check(op, x, recipe);
  c10::DeviceGuard guard(x.device());
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool transposed = recipe != Recipe::rows_hp && wants_weights;
  const Pair of_x = pair_of<Device>(op, core::as_matrix(x), true, transposed, recipe);
  const Pair of_weights = rows_of_weights<Device>(op, weights, wants_x, recipe);
  const Tensor y = product<Device>(of_x.rows, of_weights.rows, stacked(biases), x);
  auto present = [&](const Tensor& t, bool wanted) {
    return wanted && t.defined() ? t : at::empty({0}, of_x.rows.scale.options());
  };
  return {
      in_rows_of<Device>(x, y, recipe), present(of_x.columns.q, transposed), present(of_x.columns.scale, transposed),
      present(of_weights.columns.scale, wants_x)};
}

/// Checks the arguments, and computes.
struct Fp8Forward
    : core::Private<Fp8Forward, Four(const Tensor&, TensorList, TensorList, bool, bool, c10::string_view)> {
  static constexpr const char* kName = "_fp8_projections_fwd";
  static constexpr const char* kArguments = "x, weights, biases, wants_x, wants_weights, recipe";

  template <class Device>
  static Four run(
      const Tensor& x, TensorList weights, TensorList biases, bool wants_x, bool wants_weights,
      std::string_view recipe) {
    const Recipe given = recipe_of(kProjections, recipe);
    check_lists(kProjections, x, weights, biases, given);
    return compute<Device>(kProjections, x, weights, biases, wants_x, wants_weights, given);
  }
};

/// Those gradients of x, the weights and the biases that are wanted, in this order. x: with the recipe "rows_hp"
/// alone, which needs no x_t and scale_t. weights, weight_scale: for the gradient of x alone. features: of each
/// weight. wanted: of x, each weight, and each bias if there is one.
struct Fp8Backward
    : core::Private<
          Fp8Backward,
          std::vector<Tensor>(
              const Tensor&, const OptionalTensor&, TensorList, const OptionalTensor&, const OptionalTensor&,
              const OptionalTensor&, c10::SymIntArrayRef, const c10::List<bool>&, c10::string_view)> {
  static constexpr const char* kName = "_fp8_projections_bwd";
  static constexpr const char* kArguments = "dy, x, weights, x_t, scale_t, weight_scale, features, wanted, recipe";

  template <class Device>
  static std::vector<Tensor> run(
      const Tensor& dy, const OptionalTensor& x, TensorList weights, const OptionalTensor& x_t,
      const OptionalTensor& scale_t, const OptionalTensor& weight_scale, c10::SymIntArrayRef features,
      const c10::List<bool>& wanted, std::string_view recipe) {
    const Recipe given = recipe_of(kBackward, recipe);
    Device::check(kBackward, dy, given);
    c10::DeviceGuard guard(dy.device());
    const size_t count = features.size();
    bool of_weights = false;
    for (size_t i = 0; i < count; ++i) of_weights |= wanted[1 + i];
    const bool of_x = wanted[0], transposed = given != Recipe::rows_hp && of_weights;
    const Tensor rows = core::as_matrix(dy);
    std::vector<Tensor> out;
    Pair of_dy;
    if (of_x || transposed) of_dy = pair_of<Device>(kBackward, rows, of_x, transposed, given);
    auto read = [](const char* name, const OptionalTensor& t) -> const Tensor& {
      LIGER_CHECK(t && t->defined(), kBackward, name, "be given, for the gradients that are wanted", "None");
      return *t;
    };
    if (of_x) {
      const Tensor& saved = read("weight_scale", weight_scale);
      const Tensor scale = by_rows(given) ? saved.contiguous() : saved;
      const Operand columns = columns_of_weights<Device>(kBackward, weights, scale, given);
      out.push_back(in_rows_of<Device>(dy, product<Device>(of_dy.rows, columns, {}, dy), given));
    }
    Operand of_inputs{{}, {}, of_dy.columns.scales};
    if (transposed) {
      const Tensor& columns = read("x_t", x_t);
      const bool unit = columns.sym_strides().back() == 1;
      of_inputs = {unit ? columns : columns.contiguous(), read("scale_t", scale_t), of_dy.columns.scales};
    }
    c10::SymInt first = 0;
    for (size_t i = 0; i < count; first = first + features[i++]) {
      if (!wanted[1 + i]) continue;
      if (transposed) {
        const Operand part = count == 1 ? of_dy.columns : of_dy.columns.part(first, features[i]);
        out.push_back(product<Device>(part, of_inputs, {}, dy, true));
      } else {
        out.push_back(at::mm(rows.narrow_symint(1, first, features[i]).t(), core::as_matrix(read("x", x))));
      }
    }
    first = 0;
    const size_t biases = wanted.size() - 1 - count;
    for (size_t i = 0; i < biases; first = first + features[i++]) {
      if (wanted[1 + count + i]) out.push_back(rows.narrow_symint(1, first, features[i]).sum(0));
    }
    return out;
  }
};

// ---- The operators

/// Saves for the weights' gradients x, or its transposed copy and scales, and for that of x the scales of the
/// weights' columns and the weights.
template <class Op>
struct Node : core::BackwardNode<Node<Op>, core::kAnyNumber> {
  std::tuple<std::string> options;  // the recipe
  std::vector<c10::SymInt> features;
  int64_t gradients = 0;

  auto state() { return std::tie(options, features, gradients); }
  std::string name() const override { return Op::kOp; }

  template <class Biases>
  void record(const Four& out, const Tensor& x, TensorList weights, const Biases&, std::string_view recipe) {
    const auto& [y, x_t, scale_t, weight_scale] = out;
    const bool of_x = x.requires_grad(), of_weights = torch::autograd::compute_requires_grad(weights);
    auto kept = [](bool needed, const Tensor& t) { return needed ? t : Tensor(); };
    const bool whole = recipe == "rows_hp";
    this->save_all(
        {kept(of_weights && whole, x), kept(of_weights && !whole, x_t), kept(of_weights && !whole, scale_t),
         kept(of_x, weight_scale)});
    if (of_x) this->save_all(weights);
    for (const Tensor& weight : weights) features.push_back(weight.sym_size(0));
    gradients = this->num_outputs();
    this->connect(y);
  }

  core::variable_list backward(core::variable_list&& grads) override {
    core::variable_list out(gradients);
    if (!grads[0].defined()) return out;
    c10::List<bool> wanted;
    for (size_t i = 0; i < out.size(); ++i) wanted.push_back(this->needs(i));
    const Tensor x = this->take(0), x_t = this->take(1), scale_t = this->take(2), weight_scale = this->take(3);
    std::vector<Tensor> weights;
    for (size_t i = 0; wanted[0] && i < features.size(); ++i) {
      weights.push_back(this->take(4 + i));
      if (!core::has_memory(weights[i])) core::refuse_memory(kBackward, "weight", weights[i]);
    }
    auto found =
        Fp8Backward::call(grads[0], x, weights, x_t, scale_t, weight_scale, features, wanted, std::get<0>(options));
    auto next = found.begin();
    for (size_t i = 0; i < out.size(); ++i) {
      if (wanted[i]) out[i] = std::move(*next++);
    }
    return out;
  }
};

/// y, and what backward needs.
Four forward_with_graph(const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
  const bool of_x = x.requires_grad(), of_weights = torch::autograd::compute_requires_grad(weights);
  at::AutoDispatchBelowADInplaceOrView below;
  return Fp8Forward::call(x, weights, biases, of_x, of_weights, recipe);
}

struct Fp8Projections
    : core::Operator<Fp8Projections, Tensor(const Tensor&, TensorList, TensorList, c10::string_view)> {
  static constexpr const char* kOp = kProjections;
  static constexpr const char* kSchema = schemas::fp8_projections;
  using Edges = core::Positions<0, 1, 2>;
  using Node = fp8_linear::Node<Fp8Projections>;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Privates = core::Privates<Fp8Forward, Fp8Backward>;
  using Cpu = fp8_linear::Cpu;
  using Cuda = fp8_linear::Cuda;
  using Meta = fp8_linear::Meta;

  template <class Device>
  static Tensor run(bool, const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
    return std::get<0>(Fp8Forward::run<Device>(x, weights, biases, false, false, recipe));
  }

  static Four run_forward(const Tensor& x, TensorList weights, TensorList biases, std::string_view recipe) {
    return forward_with_graph(x, weights, biases, recipe);
  }
};

struct Fp8Linear
    : core::Operator<Fp8Linear, Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view)> {
  static constexpr const char* kOp = "fp8_linear";
  static constexpr const char* kSchema = schemas::fp8_linear;
  using Edges = core::Positions<0, 1, 2>;
  using Node = fp8_linear::Node<Fp8Linear>;
  using Autocast = core::AutocastLinear<0, 1, 2>;
  using Cpu = fp8_linear::Cpu;
  using Cuda = fp8_linear::Cuda;
  using Meta = fp8_linear::Meta;

  static TensorList list(const OptionalTensor& bias) {
    return bias && bias->defined() ? TensorList(*bias) : TensorList();
  }

  static Recipe check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    auto needs_memory = [](const char* name, const Tensor& t) {
      if (!core::has_memory(t)) core::refuse_memory(kOp, name, t);
    };
    needs_memory("x", x), needs_memory("weight", weight), needs_memory("bias", core::value_or_undefined(bias));
    const Recipe given = recipe_of(kOp, recipe);
    check_x(kOp, x, given);
    check_weight(kOp, "weight", weight, x, given);
    for (const Tensor& t : list(bias)) check_bias(kOp, "bias", t, weight.sym_size(0), x);
    return given;
  }

  template <class Device>
  static Tensor run(bool, const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    const Recipe given = check(x, weight, bias, recipe);
    return std::get<0>(compute<Device>(kOp, x, weight, list(bias), false, false, given));
  }

  static Four run_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view recipe) {
    check(x, weight, bias, recipe);
    return forward_with_graph(x, weight, list(bias), recipe);
  }
};

}  // namespace

LIGER_OPERATOR(Fp8Projections)
LIGER_OPERATOR(Fp8Linear)

}  // namespace liger::ops::fp8_linear
