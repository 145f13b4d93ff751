#include "runtime/products.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "runtime/cublas_lt.h"
#include "runtime/driver.h"
#include "runtime/log.h"
#include "runtime/runtime.h"

namespace liger::runtime {
namespace {

// What cuBLAS calls a tile and a cluster, how many rows and columns of c they are, and what they reach: TFLOP/s once
// the chip is full and k long, and the steps of k in whose time a tile is written out, few where that overlaps. Last, what
// they reach where products are sustained, if that is more.
struct Tile {
  bool transpose_a, transpose_b;
  int tile, cluster;
  int rows, columns, cluster_rows, cluster_columns;
  int rate, epilogue, sustained_rate = 0;
};

// Fitted to 121 products on an H200 (benchmarks/results/nvidia-h200-products.md: bf16, cuBLAS 13, hidden 2048 to 8192 by
// 4096 to 256000, 512 to 16384 tokens), measured back to back at the power limit. What these numbers choose is within
// half a percent of the fastest proposal on average, and faster than what torch gets by 6 % for x @ w.T, 2 % for d input,
// and 11 to 15 % for d weight (up to 38 % where few tokens are added to it). Between kernels that leave the chip time to
// cool, as in a whole training step, less is left of that. `python -m benchmarks products` measures and fits.
//
// Sustained: of d input, tiles that read less for each multiplication gain on those that write while they multiply. The
// linear loss of 16384 x 4096 x 128256 took 75.2 ms with 128x256, 75.9 with 256x128, 76.2 with 128x128. Those of
// 8192 x 2048 and 4096 x 4096 by 128256 took 1 % less with either of the larger ones where calls followed others' (means of
// 19.4 ms instead of 19.65, 19.4 instead of 19.5), 2 % where they followed their own (19.5 instead of 19.8 for both).
// Their rates say by how much d input alone, a third of it, gained. For other products no tile did better than before.
constexpr Tile kTiles[] = {
    {true, false, 29, 3, 128, 160, 2, 1, 710, 64},
    {true, false, 201, 5, 176, 128, 1, 2, 710, 64},
    {true, false, 197, 5, 168, 128, 1, 2, 707, 64},
    {true, false, 184, 5, 144, 128, 1, 2, 697, 64},
    {true, false, 24, 5, 256, 128, 1, 2, 704, 200},
    {true, false, 23, 3, 128, 256, 2, 1, 704, 200},
    {false, false, 20, 3, 128, 128, 2, 1, 730, 64},
    {false, false, 29, 3, 128, 160, 2, 1, 710, 64},
    {false, false, 24, 5, 256, 128, 1, 2, 715, 200, 740},
    {false, false, 23, 3, 128, 256, 2, 1, 714, 200, 760},
    {false, true, 29, 3, 128, 160, 2, 1, 724, 64},
    {false, true, 20, 5, 128, 128, 1, 2, 715, 64},
    {false, true, 24, 5, 256, 128, 1, 2, 705, 200},
    {false, true, 23, 3, 128, 256, 2, 1, 702, 200},
};
constexpr int kMeasuredFamily = 9;  // major compute capability
constexpr int kProposals = 40;
constexpr size_t kMostWorkspace = 4096;  // counters; what would need more sums in parts
constexpr size_t kMostPlans = 1024;

std::atomic<uint64_t> run_count{0};

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Relative to each other.
double expected_time(const Tile& t, const Product& p, int multiprocessors) {
  const int cluster = t.cluster_rows * t.cluster_columns;
  const int64_t clusters = up(p.m, t.rows * t.cluster_rows) * up(p.n, t.columns * t.cluster_columns);
  const int64_t waves = up(clusters, std::max(1, multiprocessors / cluster));
  return double(waves * t.rows * t.columns) * double(p.k + t.epilogue) / (p.sustained ? std::max(t.rate, t.sustained_rate) : t.rate);
}

template <class T>
T config(const CublasLt& lt, const LtAlgorithm& algorithm, int attribute) {
  T value{};
  size_t written = 0;
  lt.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return value;
}

/// One for each device. It is only read by what it is handed to.
void* handle_of(const CublasLt& lt, int device) {
  static std::array<void*, kMaxDevices> handles{};
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!handles[device] && lt.cublasLtCreate(&handles[device]) != kLtSuccess) handles[device] = nullptr;
  return handles[device];
}

}  // namespace

class ProductPlan {
 public:
  ProductPlan(const CublasLt& library, void* library_handle, const Product& p) : lt(library), handle(library_handle) {
    const int type = p.dtype == DType::BF16 ? kLtBF16 : kLtF16;
    const int transposed[] = {p.transpose_a, p.transpose_b};
    auto layout = [&](void*& out, bool transpose, int64_t rows, int64_t columns, int64_t leading) {
      return lt.cublasLtMatrixLayoutCreate(&out, type, transpose ? columns : rows, transpose ? rows : columns, leading);
    };
    complete = lt.cublasLtMatmulDescCreate(&operation, kLtComputeF32, kLtF32) == kLtSuccess &&
        lt.cublasLtMatmulDescSetAttribute(operation, kLtDescTransposeA, &transposed[0], sizeof(int)) == kLtSuccess &&
        lt.cublasLtMatmulDescSetAttribute(operation, kLtDescTransposeB, &transposed[1], sizeof(int)) == kLtSuccess &&
        layout(a, p.transpose_a, p.m, p.k, p.lda) == kLtSuccess &&
        layout(b, p.transpose_b, p.k, p.n, p.ldb) == kLtSuccess && layout(c, false, p.m, p.n, p.ldc) == kLtSuccess;
  }
  ProductPlan(const ProductPlan&) = delete;
  ~ProductPlan() {
    if (operation) lt.cublasLtMatmulDescDestroy(operation);
    for (void* layout : {a, b, c}) {
      if (layout) lt.cublasLtMatrixLayoutDestroy(layout);
    }
  }

  /// Whether one of the proposals has a tile of the table.
  bool choose(const Product& p, int multiprocessors) {
    std::array<LtHeuristic, kProposals> proposals{};
    int found = 0;
    void* preference = nullptr;
    if (!complete || lt.cublasLtMatmulPreferenceCreate(&preference) != kLtSuccess) return false;
    const uint32_t alignment = uint32_t(p.alignment);
    LtStatus status = lt.cublasLtMatmulPreferenceSetAttribute(
        preference, kLtPreferenceWorkspace, &kMostWorkspace, sizeof kMostWorkspace);
    for (int i = 0; i < 4; ++i) {
      status = status ? status
                      : lt.cublasLtMatmulPreferenceSetAttribute(
                            preference, kLtPreferenceAlignmentA + i, &alignment, sizeof alignment);
    }
    if (!status) {
      status = lt.cublasLtMatmulAlgoGetHeuristic(
          handle, operation, a, b, c, c, preference, kProposals, proposals.data(), &found);
    }
    lt.cublasLtMatmulPreferenceDestroy(preference);
    if (status) return false;
    double least = 0;
    for (int i = 0; i < found; ++i) {
      const LtHeuristic& proposal = proposals[i];
      if (proposal.state || proposal.workspace > kMostWorkspace) continue;
      if (config<int>(lt, proposal.algorithm, kLtConfigSplitK) > 1) continue;
      const int tile = config<int>(lt, proposal.algorithm, kLtConfigTile);
      const int cluster = config<uint16_t>(lt, proposal.algorithm, kLtConfigCluster);
      for (const Tile& t : kTiles) {
        if (t.transpose_a != p.transpose_a || t.transpose_b != p.transpose_b || t.tile != tile || t.cluster != cluster) {
          continue;
        }
        const double time = expected_time(t, p, multiprocessors);
        if (least == 0 || time < least) {
          least = time;
          algorithm = proposal.algorithm;
          workspace = proposal.workspace;
        }
      }
    }
    return least > 0;
  }

  const CublasLt& lt;
  void* const handle;
  void *operation = nullptr, *a = nullptr, *b = nullptr, *c = nullptr;
  LtAlgorithm algorithm{};
  size_t workspace = 0;
  bool complete = false;
};

std::shared_ptr<const ProductPlan> plan_product(const Product& p, int device) {
  static const bool enabled = [] {
    const char* value = std::getenv("LIGER_OPS_TILES");
    return !value || std::strcmp(value, "0") != 0;
  }();
  if (!enabled || (p.dtype != DType::BF16 && p.dtype != DType::F16)) return nullptr;
  if (double(p.m) * double(p.n) * double(p.k) < kLeastMultiplications) return nullptr;
  std::string error;
  const DeviceInfo* info = device_info(device, error);
  if (!info || info->capability / 10 != kMeasuredFamily) return nullptr;
  const CublasLt* lt = CublasLt::get();
  if (!lt) return nullptr;

  using Key = std::array<int64_t, 12>;
  static std::map<Key, std::shared_ptr<const ProductPlan>> plans;
  static std::mutex mutex;
  const Key key{
      device, int64_t(p.dtype), p.transpose_a, p.transpose_b, p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alignment,
      p.sustained};
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = plans.find(key); found != plans.end()) return found->second;
  }
  const RelaxedCapture relaxed(*Driver::get());
  std::shared_ptr<ProductPlan> plan;
  if (void* handle = handle_of(*lt, device)) {
    plan = std::make_shared<ProductPlan>(*lt, handle, p);
    if (!plan->choose(p, info->multiprocessors)) plan = nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex);
  // Sequences of ever new lengths must not fill memory.
  if (plans.size() >= kMostPlans) plans.clear();
  return plans.emplace(key, std::move(plan)).first->second;
}

size_t workspace_bytes(const ProductPlan& plan) { return plan.workspace; }

bool multiply(
    const ProductPlan& plan, void* stream, double alpha, const void* a, const void* b, double beta, void* c,
    void* workspace) {
  const float one = float(alpha), kept = float(beta);
  const RelaxedCapture relaxed(*Driver::get());  // the first product of its kind loads a kernel
  const LtStatus status = plan.lt.cublasLtMatmul(
      plan.handle, plan.operation, &one, a, plan.a, b, plan.b, &kept, c, plan.c, c, plan.c, &plan.algorithm, workspace,
      plan.workspace, stream);
  if (status == kLtSuccess) {
    run_count.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  log_once(
      "cuBLAS refused a matrix product in a tile that it had proposed (status " + std::to_string(status) +
      "); its own choice runs instead");
  return false;
}

uint64_t products_run() noexcept { return run_count.load(std::memory_order_relaxed); }

void reset_products_run() noexcept { run_count.store(0, std::memory_order_relaxed); }

}  // namespace liger::runtime
