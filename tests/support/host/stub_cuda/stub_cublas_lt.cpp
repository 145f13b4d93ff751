// cuBLASLt without a GPU: the functions that csrc/gemm/cublas_lt.cpp resolves. The heuristic proposes the same
// algorithms for every GEMM. GEMMs are recorded, not computed.
//
//   STUB_LT_PROPOSALS  "tile:cluster:split-k:workspace;..."
//   STUB_LT_TILES      "tile:workspace;...": other tiles that a proposal accepts
//   STUB_LT_REFUSES    the status that every GEMM returns
//   STUB_LT_PLAN_FAILS the status that the first heuristic request returns
//
// Tests read the record through stub_lt_record(): JSON objects, one per GEMM, each followed by a comma.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Algorithm {
  int tile, cluster, parts, place;
  uint64_t rest[6];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(Heuristic) == 96, "the ABI's sizes");

struct Operation {
  int compute, scale, transposed[2];
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t leading;
};
struct Preference {
  size_t workspace;
  uint32_t alignment[4];
};

std::string record;
int handles = 0;

// The device whose context is current in the stub driver; -1: none, -2: the stub driver is not loaded.
int current_device() {
  auto* ask = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "stub_current_device"));
  return ask ? ask() : -2;
}

template <class T>
T as(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

}  // namespace

EXPORT const char* stub_lt_record() { return record.c_str(); }
EXPORT int stub_lt_handles() { return handles; }

EXPORT const char* cublasLtGetStatusName(int status) {
  return status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "another";
}
EXPORT int cublasLtCreate(void** handle) {
  if (current_device() == -1) return 1;
  *handle = new int(++handles);
  return 0;
}
EXPORT int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
  *out = new Operation{compute, scale, {}};
  return 0;
}
EXPORT int cublasLtMatmulDescDestroy(void* p) { return delete static_cast<Operation*>(p), 0; }
EXPORT int cublasLtMatmulDescSetAttribute(void* p, int attribute, const void* value, size_t bytes) {
  if ((attribute != 3 && attribute != 4) || bytes != 4) return 7;
  static_cast<Operation*>(p)->transposed[attribute - 3] = as<int>(value);
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  *out = new Layout{type, rows, columns, leading};
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(void* p) { return delete static_cast<Layout*>(p), 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** out) {
  *out = new Preference{};
  return 0;
}
EXPORT int cublasLtMatmulPreferenceDestroy(void* p) { return delete static_cast<Preference*>(p), 0; }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void* p, int attribute, const void* value, size_t bytes) {
  auto* preference = static_cast<Preference*>(p);
  if (attribute == 1 && bytes == 8) {
    preference->workspace = as<size_t>(value);
  } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
    preference->alignment[attribute - 5] = as<uint32_t>(value);
  } else {
    return 7;
  }
  return 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void* p, int most, Heuristic* out, int* found) {
  static int requests = 0;
  const char* status = std::getenv("STUB_LT_PLAN_FAILS");
  if (status && requests++ == 0) return std::atoi(status);
  const char* text = std::getenv("STUB_LT_PROPOSALS");
  std::stringstream proposals(text ? text : "");
  const auto* preference = static_cast<Preference*>(p);
  for (uint32_t alignment : preference->alignment) {
    if (alignment < 16 || alignment > 256) return 7;
  }
  int place = 0;
  *found = 0;
  for (std::string one; std::getline(proposals, one, ';') && *found < most; ++place) {
    Heuristic h{};
    h.algorithm.place = place;
    Algorithm& a = h.algorithm;
    if (std::sscanf(one.c_str(), "%d:%d:%d:%zu", &a.tile, &a.cluster, &a.parts, &h.workspace) != 4) return 7;
    if (h.workspace <= preference->workspace) out[(*found)++] = h;
  }
  return *found ? 0 : 15;
}

EXPORT int cublasLtMatmulAlgoConfigGetAttribute(
    const Algorithm* algorithm, int attribute, void* out, size_t bytes, size_t* written) {
  if (attribute == 1 && bytes == 4) {
    std::memcpy(out, &algorithm->tile, 4);
  } else if (attribute == 2 && bytes == 4) {
    std::memcpy(out, &algorithm->parts, 4);
  } else if (attribute == 8 && bytes == 2) {
    const auto cluster = uint16_t(algorithm->cluster);
    std::memcpy(out, &cluster, 2);
  } else {
    return 7;
  }
  *written = bytes;
  return 0;
}

EXPORT int cublasLtMatmulAlgoConfigSetAttribute(Algorithm* algorithm, int attribute, const void* value, size_t bytes) {
  if (attribute != 1 || bytes != 4) return 7;
  algorithm->tile = as<int>(value);
  return 0;
}

EXPORT int cublasLtMatmulAlgoCheck(
    void*, void*, void*, void*, void*, void*, const Algorithm* algorithm, Heuristic* out) {
  const char* text = std::getenv("STUB_LT_TILES");
  std::stringstream tiles(text ? text : "");
  for (std::string one; std::getline(tiles, one, ';');) {
    int tile = 0;
    if (std::sscanf(one.c_str(), "%d:%zu", &tile, &out->workspace) == 2 && tile == algorithm->tile)
      return out->state = 0;
  }
  return 15;
}

EXPORT int cublasLtMatmul(
    void*, void* op, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout, const void* beta,
    const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm, void* workspace, size_t bytes,
    void* stream) {
  if (const char* status = std::getenv("STUB_LT_REFUSES")) return std::atoi(status);
  const auto* operation = static_cast<Operation*>(op);
  if (operation->compute != 68 || operation->scale != 0 || c != d || c_layout != d_layout) return 7;
  auto layout = [](void* p) {
    const auto* l = static_cast<Layout*>(p);
    std::ostringstream out;
    out << "[" << l->type << ", " << l->rows << ", " << l->columns << ", " << l->leading << "]";
    return out.str();
  };
  std::ostringstream out;
  out << "{\"place\": " << algorithm->place << ", \"tile\": " << algorithm->tile << ", \"alpha\": " << as<float>(alpha)
      << ", \"beta\": " << as<float>(beta) << ", \"transposed\": [" << operation->transposed[0] << ", "
      << operation->transposed[1] << "], \"a\": " << layout(a_layout) << ", \"b\": " << layout(b_layout)
      << ", \"c\": " << layout(c_layout) << ", \"addresses\": [" << uintptr_t(a) << ", " << uintptr_t(b) << ", "
      << uintptr_t(d) << "], \"device\": " << current_device() << ", \"workspace\": [" << uintptr_t(workspace) << ", "
      << bytes << "], \"stream\": " << uintptr_t(stream) << "},";
  record += out.str();
  return 0;
}
