#include "gemm/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "gemm/cublas_lt.h"
#include "runtime/device.h"
#include "runtime/driver.h"
#include "runtime/immortal.h"
#include "runtime/log.h"
#include "runtime/status.h"

namespace liger::gemm {

using runtime::Driver;
using runtime::DType;

namespace {

struct Tile {
  bool transpose_a, transpose_b;
  int tile, cluster;  // cuBLAS's enum values
  int rows, columns, cluster_rows, cluster_columns;
  // rate: TFLOP/s of a full GPU at a large k; 0 if not measured or never the fastest. epilogue: its cost in k-steps,
  // small if it overlaps with the next tile's main loop. sustained_*: the same for sustained GEMMs.
  int rate, epilogue, sustained_rate, sustained_epilogue;
  int derived_from = 0;  // proposed tile of the same kind, for a tile that cuBLAS does not propose
};

// Fitted to measurements on an H200 (benchmarks/results/nvidia-h200-gemm.md and nvidia-h200-gemm-sustained.md).
// `python -m benchmarks gemm` and `gemm --sustained` measure and fit.
//
// Sustained: after a tenth of a second of GEMMs, the power limit lowers the GPU's clock. The fastest tiles are then
// those that read least per multiplication, and cuBLAS has larger ones than it proposes. The clock is
// higher in a whole training step than in the benchmark of sustained GEMMs. At a k of 4096, tiles whose epilogue
// overlaps are 2 to 3 % faster there, relative to the others. So their sustained rates are 2 % above the measurement,
// and the sustained epilogue of the others is 320 instead of 160.
constexpr Tile kTiles[] = {
    {true, false, 29, 3, 128, 160, 2, 1, 710, 64, 690, 0},
    {true, false, 201, 5, 176, 128, 1, 2, 710, 64, 704, 0},
    {true, false, 197, 5, 168, 128, 1, 2, 707, 64, 699, 0},
    {true, false, 184, 5, 144, 128, 1, 2, 697, 64, 0, 0},
    {true, false, 24, 5, 256, 128, 1, 2, 704, 200, 706, 320},
    {true, false, 23, 3, 128, 256, 2, 1, 704, 200, 705, 320},
    {true, false, 500, 5, 256, 144, 1, 2, 0, 0, 721, 320, 24},
    {true, false, 501, 5, 256, 152, 1, 2, 0, 0, 715, 320, 24},
    {true, false, 502, 5, 256, 160, 1, 2, 0, 0, 720, 320, 24},
    {true, false, 503, 5, 256, 168, 1, 2, 0, 0, 714, 320, 24},
    {true, false, 504, 5, 256, 176, 1, 2, 0, 0, 723, 320, 24},
    {true, false, 195, 3, 160, 256, 2, 1, 0, 0, 714, 320, 23},
    {true, false, 203, 3, 176, 256, 2, 1, 0, 0, 725, 320, 23},
    {false, false, 20, 3, 128, 128, 2, 1, 730, 64, 673, 0},
    {false, false, 29, 3, 128, 160, 2, 1, 710, 64, 690, 0},
    {false, false, 24, 5, 256, 128, 1, 2, 715, 200, 705, 320},
    {false, false, 23, 3, 128, 256, 2, 1, 714, 200, 698, 320},
    {false, false, 500, 5, 256, 144, 1, 2, 0, 0, 714, 320, 24},
    {false, false, 501, 5, 256, 152, 1, 2, 0, 0, 709, 320, 24},
    {false, false, 502, 5, 256, 160, 1, 2, 0, 0, 717, 320, 24},
    {false, false, 503, 5, 256, 168, 1, 2, 0, 0, 715, 320, 24},
    {false, false, 504, 5, 256, 176, 1, 2, 0, 0, 719, 320, 24},
    {false, false, 195, 3, 160, 256, 2, 1, 0, 0, 706, 320, 23},
    {false, false, 203, 3, 176, 256, 2, 1, 0, 0, 707, 320, 23},
    {false, true, 29, 3, 128, 160, 2, 1, 724, 64, 674, 0},
    {false, true, 20, 5, 128, 128, 1, 2, 715, 64, 671, 0},
    {false, true, 24, 5, 256, 128, 1, 2, 705, 200, 698, 320},
    {false, true, 23, 3, 128, 256, 2, 1, 702, 200, 698, 320},
    {false, true, 500, 5, 256, 144, 1, 2, 0, 0, 699, 320, 24},
    {false, true, 502, 5, 256, 160, 1, 2, 0, 0, 704, 320, 24},
    {false, true, 504, 5, 256, 176, 1, 2, 0, 0, 712, 320, 24},
    {false, true, 186, 3, 144, 256, 2, 1, 0, 0, 700, 320, 23},
    {false, true, 195, 3, 160, 256, 2, 1, 0, 0, 703, 320, 23},
    {false, true, 203, 3, 176, 256, 2, 1, 0, 0, 705, 320, 23},
};
// The fraction of a wave's idle time that is lost. Sustained: idle multiprocessors leave their power to the others.
constexpr double kIdleLost = 1, kIdleLostSustained = 0.5;
constexpr int kMeasuredFamily = 9;  // major compute capability
constexpr int kProposals = 40;
constexpr size_t kMaxWorkspace = 4096;  // for counters; algorithms that need more split the sum over k
constexpr size_t kMaxPlans = 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Expected time in arbitrary units; 0 if unknown.
double expected_time(const Tile& t, const Problem& p, int multiprocessors) {
  const auto [rate, epilogue, lost] = p.sustained
      ? std::tuple(t.sustained_rate, t.sustained_epilogue, kIdleLostSustained)
      : std::tuple(t.rate, t.epilogue, kIdleLost);
  if (rate == 0) return 0;
  const int cluster = t.cluster_rows * t.cluster_columns;
  const int64_t clusters = ceil_div(p.m, t.rows * t.cluster_rows) * ceil_div(p.n, t.columns * t.cluster_columns);
  const double waves = double(clusters) / std::max(1, multiprocessors / cluster);
  return (waves + lost * (std::ceil(waves) - waves)) * double(t.rows * t.columns) * double(p.k + epilogue) / rate;
}

template <class T>
T config(const CublasLt& lt, const LtAlgorithm& algorithm, int attribute) {
  T value{};
  size_t written = 0;
  lt.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return value;
}

/// True for errors of the device or the process, not of the request: the next call may succeed.
bool is_transient(LtStatus status) {
  return status == kLtNotInitialized || status == kLtAllocFailed || status == kLtExecutionFailed ||
      status == kLtInternalError;
}

/// One handle per device. Threads can share it, because cuBLASLt calls only read it.
void* handle_of(const CublasLt& lt, int device) {
  static std::array<void*, runtime::kMaxDevices> handles{};
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!handles[device] && lt.cublasLtCreate(&handles[device]) != kLtSuccess) handles[device] = nullptr;
  return handles[device];
}

}  // namespace

class Plan {
 public:
  Plan(const CublasLt& library, void* library_handle, const Problem& p, int device_index)
      : lt(library), handle(library_handle), device(device_index) {
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
  Plan(const Plan&) = delete;
  ~Plan() {
    if (operation) lt.cublasLtMatmulDescDestroy(operation);
    for (void* layout : {a, b, c}) {
      if (layout) lt.cublasLtMatrixLayoutDestroy(layout);
    }
  }

  /// cuBLAS's proposals, its own choice first. Returns cuBLAS's status.
  LtStatus propose(const Problem& p, std::array<LtHeuristic, kProposals>& proposals, int& found) const {
    void* preference = nullptr;
    LtStatus status = complete ? lt.cublasLtMatmulPreferenceCreate(&preference) : kLtAllocFailed;
    if (status) return status;
    auto set = [&](int attribute, const auto& value) {
      if (!status) status = lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
    };
    set(kLtPreferenceWorkspace, kMaxWorkspace);
    for (int i = 0; i < 4; ++i) set(kLtPreferenceAlignmentA + i, uint32_t(p.alignment));
    if (!status) {
      status = lt.cublasLtMatmulAlgoGetHeuristic(
          handle, operation, a, b, c, c, preference, kProposals, proposals.data(), &found);
    }
    lt.cublasLtMatmulPreferenceDestroy(preference);
    return status;
  }

  /// Chooses an algorithm. False if none is better than the one that cuBLAS would take. status: cuBLAS's status.
  bool choose(const Problem& p, int multiprocessors, LtStatus& status) {
    std::array<LtHeuristic, kProposals> proposals{};
    int found = 0;
    status = propose(p, proposals, found);
    if (status) return false;
    // Drop algorithms that split the sum over k: cuBLAS rounds the parts to 16 bits, even if it reports fp32.
    auto end = std::remove_if(proposals.begin(), proposals.begin() + found, [&](const LtHeuristic& proposal) {
      return proposal.state || proposal.workspace > kMaxWorkspace ||
          config<int>(lt, proposal.algorithm, kLtConfigSplitK) > 1;
    });
    return choose_tile(p, multiprocessors, proposals.begin(), end) ||
        choose_unsplit_sum(p, multiprocessors, proposals.begin(), end);
  }

  /// Chooses the fastest tile of the table. False if cuBLAS proposes none of them.
  bool choose_tile(const Problem& p, int multiprocessors, const LtHeuristic* begin, const LtHeuristic* end) {
    double least = 0;
    for (const Tile& t : kTiles) {
      if (t.transpose_a != p.transpose_a || t.transpose_b != p.transpose_b) continue;
      const double time = expected_time(t, p, multiprocessors);
      if (time == 0 || (least > 0 && time >= least)) continue;
      const int proposed = t.derived_from ? t.derived_from : t.tile;
      auto fits = [&](const LtHeuristic& proposal) {
        return config<int>(lt, proposal.algorithm, kLtConfigTile) == proposed &&
            config<uint16_t>(lt, proposal.algorithm, kLtConfigCluster) == t.cluster;
      };
      auto proposal = std::find_if(begin, end, fits);
      if (proposal == end) continue;
      LtHeuristic chosen = *proposal;
      if (t.derived_from && !resize(chosen, t.tile)) continue;
      least = time;
      algorithm = chosen.algorithm;
      workspace = chosen.workspace;
    }
    return least > 0;
  }

  /// If there are too few tiles to fill the GPU, cuBLAS may split the sum over k. Chooses the first proposal that does
  /// not.
  bool choose_unsplit_sum(const Problem& p, int multiprocessors, const LtHeuristic* begin, const LtHeuristic* end) {
    constexpr int64_t kUsualTile = 128;
    if (begin == end || ceil_div(p.m, kUsualTile) * ceil_div(p.n, kUsualTile) >= multiprocessors) return false;
    algorithm = begin->algorithm;
    workspace = begin->workspace;
    return true;
  }

  /// Changes the tile of a proposal and keeps everything else. False, with nothing changed, if cuBLAS does not support
  /// that.
  bool resize(LtHeuristic& proposal, int tile) const {
    LtAlgorithm resized = proposal.algorithm;
    LtHeuristic checked{};
    if (lt.cublasLtMatmulAlgoConfigSetAttribute(&resized, kLtConfigTile, &tile, sizeof tile)) return false;
    if (lt.cublasLtMatmulAlgoCheck(handle, operation, a, b, c, c, &resized, &checked)) return false;
    if (checked.state || checked.workspace > kMaxWorkspace) return false;
    proposal.algorithm = resized;
    proposal.workspace = checked.workspace;
    return true;
  }

  const CublasLt& lt;
  void* const handle;
  const int device;
  void *operation = nullptr, *a = nullptr, *b = nullptr, *c = nullptr;
  LtAlgorithm algorithm{};
  size_t workspace = 0;
  bool complete = false;
};

std::shared_ptr<const Plan> plan(const Problem& p, int device) {
  static const bool enabled = [] {
    const char* value = std::getenv("LIGER_OPS_TILES");
    return !value || std::strcmp(value, "0") != 0;
  }();
  if (!enabled || (p.dtype != DType::BF16 && p.dtype != DType::F16)) return nullptr;
  if (double(p.m) * double(p.n) * double(p.k) < kMinMultiplications) return nullptr;
  std::string error;
  const runtime::DeviceInfo* info = runtime::device_info(device, error);
  if (!info || info->capability / 10 != kMeasuredFamily) return nullptr;
  const CublasLt* lt = CublasLt::get();
  if (!lt) return nullptr;

  using Key = std::array<int64_t, 12>;
  static auto& plans = runtime::immortal<std::map<Key, std::shared_ptr<const Plan>>>();
  static std::mutex mutex;
  const Key key{device, int64_t(p.dtype), p.transpose_a, p.transpose_b, p.m, p.n, p.k, p.lda, p.ldb,
                p.ldc,  p.alignment,      p.sustained};
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = plans.find(key); found != plans.end()) return found->second;
  }
  if (!runtime::ensure_context(device).empty()) return nullptr;
  const runtime::RelaxedCapture relaxed(*Driver::get());
  void* handle = handle_of(*lt, device);
  if (!handle) return nullptr;
  auto made = std::make_shared<Plan>(*lt, handle, p, device);
  LtStatus status = kLtSuccess;
  if (!made->choose(p, info->multiprocessors, status)) made = nullptr;
  if (is_transient(status)) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  // Bound the memory of programs in which every sequence has a new length.
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans.emplace(key, std::move(made)).first->second;
}

size_t workspace_bytes(const Plan& plan) { return plan.workspace; }

bool run(
    const Plan& plan, void* stream, double alpha, const void* a, const void* b, double beta, void* c, void* workspace,
    std::string& error) {
  const float alpha_value = float(alpha), beta_value = float(beta);
  const Driver& driver = *Driver::get();
  if (error = runtime::ensure_context(plan.device); !error.empty()) {
    error = "GEMM failed: " + error;
    return false;
  }
  const runtime::RelaxedCapture relaxed(driver);  // the first GEMM of its kind loads a kernel
  const LtStatus status = plan.lt.cublasLtMatmul(
      plan.handle, plan.operation, &alpha_value, a, plan.a, b, plan.b, &beta_value, c, plan.c, c, plan.c,
      &plan.algorithm, workspace, plan.workspace, stream);
  if (status == kLtSuccess) {
    runtime::count_gemm();
    return true;
  }
  const std::string failure = plan.lt.failure("cublasLtMatmul", status);
  // cuBLAS reports all device failures with one status. The driver returns the specific error.
  size_t free = 0, total = 0;
  if (const runtime::CuResult sticky = driver.cuMemGetInfo(&free, &total); runtime::is_sticky(sticky)) {
    error = "GEMM failed: " + failure + ", " + driver.failure("cuMemGetInfo", sticky);
    return false;
  }
  runtime::log_once("a GEMM failed in a tile that cuBLAS had proposed: " + failure + "; its own choice runs instead");
  return false;
}

}  // namespace liger::gemm
