#include "runtime/loader.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <tuple>

#include "runtime/arch.h"
#include "runtime/immortal.h"
#include "runtime/interpreter.h"
#include "runtime/jit_cache.h"
#include "runtime/log.h"

namespace liger::runtime {
namespace {

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
  return text;
}

bool fits(const Pack& pack, BinaryKind kind, int capability) {
  bool runs = kind == BinaryKind::Cubin ? cubin_runs_on(pack.arch(), capability) : ptx_runs_on(pack.arch(), capability);
  return pack.kind() == kind && runs;
}

class HookHolder {
 public:
  void set(CompileHook hook) {
    std::lock_guard<std::mutex> lock(mutex_);
    hook_ = std::make_shared<CompileHook>(std::move(hook));
  }
  std::shared_ptr<CompileHook> get() {
    std::lock_guard<std::mutex> lock(mutex_);
    return hook_ && *hook_ ? hook_ : nullptr;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<CompileHook> hook_;
};

HookHolder& hook_holder() {
  static auto& holder = immortal<HookHolder>();
  return holder;
}

// refused: set if the driver could not use this binary, so that another one may load.
const Function* load_binary(
    const Driver& driver, const Device& device, const KernelSpec& spec, const Binary& binary, Source source,
    std::string& error, bool& refused) {
  RelaxedCapture relaxed(driver);
  CurrentContext current(driver, device.context.load(std::memory_order_acquire));
  void *module = nullptr, *handle = nullptr;
  const char* call = "cuCtxPushCurrent";
  CuResult result = current.result;
  if (result == kCuSuccess) {
    call = "cuModuleLoadData";
    result = driver.cuModuleLoadData(&module, binary.code.c_str());
  }
  if (result == kCuSuccess) {
    call = "cuModuleGetFunction";
    result = driver.cuModuleGetFunction(&handle, module, spec.symbol);
  }
  if (result == kCuSuccess && binary.shared > kCuDefaultShared) {
    call = "cuFuncSetAttribute";
    result = driver.cuFuncSetAttribute(handle, kCuFunctionDynamicShared, int(binary.shared));
  }
  if (result != kCuSuccess) {
    error = driver.failure(call, result);
    refused = refuses_binary(result);
    // Unload, because the next launch tries again.
    if (module) driver.cuModuleUnload(module);
    return nullptr;
  }
  return new Function{handle, binary.num_warps * 32, binary.shared, source};
}

struct Attempt {
  Kernel& kernel;
  uint32_t variant;
  const Device& device;
  const Driver& driver;
  // Errors of binaries that the driver refused, reasons why sources have none, and the error that ends the search.
  std::string refusals, lacks, failure;

  const char* name() const { return kernel.spec().variant_names[variant]; }
  std::string arch() const { return "sm_" + std::to_string(device.info.capability); }

  static void add(std::string& list, const std::string& why) { list += (list.empty() ? "" : "; ") + why; }

  std::string why_none() const {
    if (!failure.empty()) return failure;
    const std::string hash = " has it (" + hex(kernel.spec().hash) + "): " + lacks;
    if (refusals.empty()) return "no source" + hash;
    return refusals + (lacks.empty() ? "" : "; no other source" + hash);
  }

  const Function* from_pack(const Pack& pack, Source source) {
    Binary binary;
    std::string error;
    auto found = pack.find(kernel.spec().hash, variant, binary, error);
    if (found == Pack::Lookup::Absent) {
      error = pack.origin() + ": holds no " + kernel.spec().name + " of this build (" + hex(kernel.spec().hash) + ")";
      log_once("kernel pack ignored: " + error);
    } else if (found == Pack::Lookup::Damaged) {
      log_once("kernel ignored: " + error);
    } else {
      bool refused = false;
      auto* function = load_binary(driver, device, kernel.spec(), binary, source, error, refused);
      if (function) return function;
      if (!refused) {
        failure = error;
        return nullptr;
      }
      error = pack.origin() + ": " + error;
      log_once(std::string(name()) + " did not load: " + error);
      add(refusals, error);
      return nullptr;
    }
    add(lacks, error);
    return nullptr;
  }

  const Function* from_packs(BinaryKind kind) {
    bool any = false;
    for (const auto& pack : packs()) {
      if (!fits(*pack, kind, device.info.capability)) continue;
      any = true;
      auto* function = from_pack(*pack, kind == BinaryKind::Cubin ? Source::Pack : Source::Ptx);
      if (done(function)) return function;
    }
    if (!any)
      add(lacks, pack_directory() + ": " + (kind == BinaryKind::Cubin ? "no pack for " : "no PTX for ") + arch());
    return nullptr;
  }

  const Function* from_cache() {
    auto path = JitCache::path(kernel.spec().name, kernel.spec().hash, variant, device.info.capability, false);
    std::string error;
    if (path.empty() || access(path.c_str(), F_OK) != 0) return nullptr;
    if (auto pack = Pack::open(path, error)) return from_pack(*pack, Source::Cache);
    log_once("JIT cache file ignored: " + error);
    return nullptr;
  }

  const Function* from_hook() {
    auto hook = hook_holder().get();
    if (!hook) {
      add(lacks, "JIT: no compiler is registered (needs Python with Triton)");
      return nullptr;
    }
    log_once(std::string(name()) + ": compiling for " + arch());
    std::string error;
    std::string bytes = (*hook)(kernel.spec(), variant, device.info.capability, error);
    auto pack = bytes.empty() ? nullptr : Pack::parse(bytes, "the compiled kernel", error);
    const Function* function = pack ? from_pack(*pack, Source::Hook) : nullptr;
    if (!pack) {
      log_once(std::string(name()) + " was not compiled: " + error);
      add(lacks, "JIT: " + error);
    }
    if (function) {
      auto path = JitCache::path(kernel.spec().name, kernel.spec().hash, variant, device.info.capability, true);
      if (!path.empty()) JitCache::store(path, bytes);
    }
    return function;
  }

  // Stops after an error that every source would meet: compiling takes seconds and could not help.
  bool done(const Function* function) const { return function || !failure.empty(); }

  const Function* from_anywhere(bool compile) {
    auto* function = from_packs(BinaryKind::Cubin);
    if (done(function)) return function;
    if (jit_enabled()) {
      function = from_cache();
      if (done(function) || !compile) return function;
      function = from_hook();
      if (done(function)) return function;
    } else {
      add(lacks, "JIT: switched off by LIGER_OPS_JIT=0");
    }
    function = compile ? from_packs(BinaryKind::Ptx) : nullptr;
    if (function) log_once("kernels for " + arch() + " are compiled by the driver from PTX");
    return function;
  }
};

// One thread loads each (kernel, variant, device), and the others wait. No thread holds a lock of the loader meanwhile:
// the compile hook may need the GIL, which another thread that calls the loader may hold.
class Loader {
 public:
  const Function* load(Kernel& kernel, uint32_t variant, int index, bool compile, Failure& failure) {
    const Device& device = device_at(index);
    const Driver* driver = Driver::get(&failure.why);
    if (!device.error.empty()) failure.why = device.error;
    if (!driver || !device.error.empty()) return nullptr;
    if (!kernel.spec().supports(device.info.capability)) {
      failure.why = "it is not for sm_" + std::to_string(device.info.capability);
      return nullptr;
    }
    if (!retain_context(*driver, device, failure.why)) {
      failure.transient = true;
      return nullptr;
    }
    const Key key{&kernel, variant, index};
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !busy_.count(key); });
    if (auto* function = kernel.loaded(index, variant)) return function;
    busy_.insert(key);
    lock.unlock();
    // Runs even if the hook throws, so that no thread waits forever.
    struct Done {
      Loader& loader;
      const Key& key;
      ~Done() {
        std::lock_guard<std::mutex> lock(loader.mutex_);
        loader.busy_.erase(key);
        loader.changed_.notify_all();
      }
    } done{*this, key};

    Attempt attempt{kernel, variant, device, *driver, {}, {}, {}};
    const Function* function = attempt.from_anywhere(compile);
    if (function) {
      kernel.publish(index, variant, function);
    } else {
      failure = {attempt.why_none(), !attempt.failure.empty()};
    }
    return function;
  }

 private:
  using Key = std::tuple<Kernel*, uint32_t, int>;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Key> busy_;
};

std::string failed_load(const Kernel& kernel, uint32_t variant, int device, const std::string& why) {
  return failed_on(device, "loading " + kernel.name_of(variant), why);
}

}  // namespace

const std::vector<std::unique_ptr<Pack>>& packs() {
  using Packs = std::vector<std::unique_ptr<Pack>>;
  static const auto& opened = immortal<const Packs>([] {
    Packs found;
    std::string folder = pack_directory();
    std::vector<std::string> files;
    DIR* listing = opendir(folder.c_str());
    std::string why = listing ? "" : std::string(": ") + std::strerror(errno);
    if (listing) {
      while (dirent* item = readdir(listing)) {
        std::string name = item->d_name;
        if (name.size() > 5 && name.compare(name.size() - 5, 5, ".pack") == 0) files.push_back(folder + "/" + name);
      }
      closedir(listing);
    }
    // Without a device, packs are not needed.
    if (files.empty() && device_count() > 0) log_once("no kernel packs in " + folder + why);
    for (const auto& file : files) {
      std::string error;
      if (auto pack = Pack::open(file, error)) {
        found.push_back(std::move(pack));
      } else {
        log_once("kernel pack ignored: " + error);
      }
    }
    // The highest target first, because it is the closest of those that fit.
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a->arch() > b->arch(); });
    return found;
  }());
  return opened;
}

const Function* load(Kernel& kernel, uint32_t variant, int device, bool compile, Failure& failure) {
  static auto& loader = immortal<Loader>();
  return loader.load(kernel, variant, device, compile, failure);
}

const char* path_of(const Kernel& kernel, const Device& device) {
  auto in_packs = [&](BinaryKind kind) {
    return std::any_of(packs().begin(), packs().end(), [&](const auto& pack) {
      return fits(*pack, kind, device.info.capability) && pack->holds(kernel.spec().hash, 0);
    });
  };
  if (in_packs(BinaryKind::Cubin)) return "aot";
  if (jit_enabled() && has_compile_hook()) return "jit";
  return in_packs(BinaryKind::Ptx) ? "ptx" : "none";
}

std::string try_config(
    Kernel& kernel, int device, const std::string& config, uint32_t configs, const std::vector<uint32_t>& variants,
    const std::string& bytes) {
  std::string error;
  const Driver* driver = Driver::get(&error);
  if (!driver) return error;
  const Device& found = device_at(device);
  if (!found.error.empty()) return found.error;
  if (!retain_context(*driver, found, error)) return error;
  auto pack = Pack::parse(bytes, "the candidate", error);
  if (!pack) return error;
  Trial trial{config, variants.at(0) % configs, {}};
  for (uint32_t variant : variants) {
    Attempt attempt{kernel, variant, found, *driver, {}, {}, {}};
    const Function* function = attempt.from_pack(*pack, Source::Hook);
    if (!function) return attempt.why_none();
    const uint32_t point = variant / configs;
    if (trial.functions.size() <= point) trial.functions.resize(point + 1);
    trial.functions[point] = function;
  }
  kernel.set_trial(new Trial(std::move(trial)));
  return {};
}

Loads loads(Kernel& kernel, uint32_t variant, int device) {
  if (interpreter()) return Loads::Yes;
  if (device < 0 || device >= kMaxDevices) return Loads::No;
  if (kernel.loaded(device, variant)) return Loads::Yes;
  Failure failure;
  if (load(kernel, variant, device, true, failure)) return Loads::Yes;
  log_once(failed_load(kernel, variant, device, failure.why));
  return failure.transient ? Loads::NotNow : Loads::No;
}

std::vector<Kernel*> kernels_of(const std::vector<std::string>& ops, std::string& error) {
  if (ops.empty()) return Kernel::all();
  std::set<const Kernel*> wanted;
  for (const std::string& op : ops) {
    size_t best = 0;
    for (const Kernel* kernel : Kernel::all()) best = std::max(best, kernel->spec().match_operator(op));
    if (best == 0) error = "ops must be operators that launch kernels (got '" + op + "')";
    for (const Kernel* kernel : Kernel::all()) {
      if (best && kernel->spec().match_operator(op) == best) wanted.insert(kernel);
    }
  }
  std::vector<Kernel*> out;
  std::copy_if(
      Kernel::all().begin(), Kernel::all().end(), std::back_inserter(out), [&](auto* k) { return wanted.count(k); });
  return out;
}

Preloaded preload(int device, const std::vector<std::string>& ops) {
  Preloaded out;
  auto kernels = kernels_of(ops, out.error);
  if (!out.error.empty() || !device_info(device, out.error)) return out;
  for (Kernel* kernel : kernels) {
    if (!kernel->spec().supports(device_at(device).info.capability)) continue;
    for (uint32_t variant = 0; variant < kernel->spec().variants; ++variant) {
      if (!kernel->spec().has_variant(variant)) continue;
      Failure failure;
      const bool loaded = load(*kernel, variant, device, false, failure);
      if (failure.transient) {
        out.error = failed_load(*kernel, variant, device, failure.why);
        return out;
      }
      loaded ? ++out.loaded : ++out.missing;
    }
  }
  return out;
}

void set_compile_hook(CompileHook hook) { hook_holder().set(std::move(hook)); }

bool has_compile_hook() { return hook_holder().get() != nullptr; }

void set_compiler(const std::string& compiler) { JitCache::set_compiler(compiler); }

bool jit_enabled() {
  const char* value = std::getenv("LIGER_OPS_JIT");
  return !value || std::strcmp(value, "0") != 0;
}

std::string jit_cache_directory() { return JitCache::directory(); }

std::string pack_directory() {
  if (const char* chosen = std::getenv("LIGER_OPS_PACK_DIR")) return chosen;
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&pack_directory), &info);
  std::string library = info.dli_fname ? info.dli_fname : "";
  auto parent = [](const std::string& path) {
    auto slash = path.rfind('/');
    return slash == std::string::npos ? std::string(".") : path.substr(0, slash);
  };
  return parent(parent(library)) + "/packs";
}

}  // namespace liger::runtime
