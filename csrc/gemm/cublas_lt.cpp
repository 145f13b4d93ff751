#include "gemm/cublas_lt.h"

#include <dlfcn.h>

#include <initializer_list>
#include <type_traits>

#include "runtime/immortal.h"

namespace liger::gemm {
namespace {

struct Loaded {
  CublasLt lt{};
  bool complete = false;

  Loaded() {
    void* library = nullptr;
    // Use only a library that is already loaded: loading one would add hundreds of megabytes of kernels.
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (!library) library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    }
    if (!library) return;
    complete = true;
    auto resolve = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function;
    };
    resolve(lt.cublasLtCreate, "cublasLtCreate");
    resolve(lt.cublasLtMatmulDescCreate, "cublasLtMatmulDescCreate");
    resolve(lt.cublasLtMatmulDescDestroy, "cublasLtMatmulDescDestroy");
    resolve(lt.cublasLtMatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    resolve(lt.cublasLtMatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    resolve(lt.cublasLtMatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    resolve(lt.cublasLtMatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    resolve(lt.cublasLtMatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    resolve(lt.cublasLtMatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    resolve(lt.cublasLtMatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    resolve(lt.cublasLtMatmulAlgoConfigGetAttribute, "cublasLtMatmulAlgoConfigGetAttribute");
    resolve(lt.cublasLtMatmulAlgoConfigSetAttribute, "cublasLtMatmulAlgoConfigSetAttribute");
    resolve(lt.cublasLtMatmulAlgoCheck, "cublasLtMatmulAlgoCheck");
    resolve(lt.cublasLtMatmul, "cublasLtMatmul");
    lt.cublasLtGetStatusName = reinterpret_cast<const char* (*)(LtStatus)>(dlsym(library, "cublasLtGetStatusName"));
  }
};

}  // namespace

const CublasLt* CublasLt::get() {
  static const auto& loaded = runtime::immortal<Loaded>();
  return loaded.complete ? &loaded.lt : nullptr;
}

std::string CublasLt::failure(const char* call, LtStatus status) const {
  const char* name = cublasLtGetStatusName ? cublasLtGetStatusName(status) : "status";
  return std::string(call) + " returned " + name + " (" + std::to_string(status) + ")";
}

}  // namespace liger::gemm
