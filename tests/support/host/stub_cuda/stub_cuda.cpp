// A CUDA driver without a GPU: the functions that csrc/runtime/driver.cpp resolves, and nothing else. Every call is
// recorded; any call can be made to fail.
//
//   STUB_CUDA_DEVICES  devices, separated by semicolons: "9.0:132:Stub H200;8.0:108:Stub A100". Default: a "Stub H200".
//   STUB_CUDA_FAIL     "cuInit=100;cuModuleLoadData=209@2;cuLaunchKernel=719@1-3": cuInit always fails with error 100,
//                      cuModuleLoadData fails from its second call on, cuLaunchKernel fails in its first three calls
//
// Tests read the record through stub_record(): one line per call, "call key=value ...", followed by
// "error call=... code=..." if the call returned an error.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDynamicShared = 8;
constexpr int kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500;

struct Device {
  int major, minor, multiprocessors;
  std::string name;
};
struct Context {
  int device;
};
struct Module {
  int device;
  std::string image;
};
struct Function {
  Module* module;
  std::string symbol;
  int most_shared;
};

// Not destroyed: threads may call the driver while the process ends.
std::mutex mutex;
std::string& record = *new std::string;
std::map<std::string, int>& calls = *new std::map<std::string, int>;
struct Failure {
  int error, first, last;
};
std::map<std::string, Failure>& failures = *new std::map<std::string, Failure>;
std::atomic<bool> recording{true};
std::atomic<bool> capturing{false};
Context contexts[64];
thread_local std::vector<Context*> stack;
thread_local int capture_mode = 0;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

const std::vector<Device>& devices() {
  static const auto& found = *new auto([] {
    std::vector<Device> out;
    auto text = variable("STUB_CUDA_DEVICES");
    for (const auto& item : split(text.empty() ? "9.0:132:Stub H200" : text, ';')) {
      auto fields = split(item, ':');
      int major = 0, minor = 0;
      std::sscanf(fields.at(0).c_str(), "%d.%d", &major, &minor);
      out.push_back({major, minor, std::atoi(fields.at(1).c_str()), fields.at(2)});
      contexts[out.size() - 1].device = int(out.size()) - 1;
    }
    return out;
  }());
  return found;
}

void set_failures(const std::string& text) {
  failures.clear();
  calls.clear();
  for (const auto& item : split(text, ';')) {
    Failure failure{0, 1, INT_MAX};
    auto equals = item.find('=');
    std::sscanf(item.c_str() + equals + 1, "%d@%d-%d", &failure.error, &failure.first, &failure.last);
    failures[item.substr(0, equals)] = failure;
  }
}

[[maybe_unused]] const bool configured = (set_failures(variable("STUB_CUDA_FAIL")), true);

// The context that is current in this thread, or null.
Context* current() { return stack.empty() ? nullptr : stack.back(); }

void record_error(const char* call, int error) {
  record += std::string("error call=") + call + " code=" + std::to_string(error) + "\n";
}

// Records and returns an error that the stub itself detects.
int refuse(const char* call, int error) {
  std::lock_guard<std::mutex> lock(mutex);
  record_error(call, error);
  return error;
}

// Records the call. Returns the error configured for it, or 0.
int enter(const char* call, const std::string& facts = "") {
  std::lock_guard<std::mutex> lock(mutex);
  record += std::string(call) + (facts.empty() ? "" : " ") + facts + "\n";
  int times = ++calls[call];
  auto failure = failures.find(call);
  if (failure == failures.end() || times < failure->second.first || times > failure->second.last) return 0;
  record_error(call, failure->second.error);
  return failure->second.error;
}

std::string hex(const void* data, size_t size) {
  std::string out;
  char digits[3];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const uint8_t*>(data)[i]);
    out += digits;
  }
  return out;
}

template <class T>
T field(const char* image, size_t offset) {
  T value;
  std::memcpy(&value, image + offset, sizeof value);
  return value;
}

// The driver receives no length: ELF headers give the size, PTX ends with a null byte.
size_t image_size(const char* image) {
  if (std::memcmp(image, "\177ELF", 4) != 0) return std::strlen(image);
  auto table = field<uint64_t>(image, 40);
  auto entry = field<uint16_t>(image, 58), count = field<uint16_t>(image, 60);
  size_t end = table + size_t(entry) * count;
  size_t segments = size_t(field<uint16_t>(image, 54)) * field<uint16_t>(image, 56);
  end = std::max(end, size_t(field<uint64_t>(image, 32)) + segments);
  for (int i = 0; i < count; ++i) {
    size_t section = table + size_t(entry) * i;
    bool occupies = field<uint32_t>(image, section + 4) != 8;
    uint64_t section_end = field<uint64_t>(image, section + 24) + field<uint64_t>(image, section + 32);
    if (occupies) end = std::max(end, size_t(section_end));
  }
  return end;
}

uint64_t fnv(const std::string& bytes) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : bytes) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

// Packs the arguments as the constant bank holds them, at the offsets in the image's KPARAM_INFO records.
std::string gather(const std::string& image, void** parameters) {
  std::map<unsigned, std::pair<unsigned, unsigned>> places;  // offset, size
  const std::string mark("\x04\x17\x0c\x00", 4);
  for (size_t at = image.find(mark); at != std::string::npos; at = image.find(mark, at + 1)) {
    const auto ordinal = field<uint16_t>(image.data(), at + 8), offset = field<uint16_t>(image.data(), at + 10);
    places[ordinal] = {offset, field<uint32_t>(image.data(), at + 12) >> 18};
  }
  std::string out;
  for (const auto& [ordinal, place] : places) {
    const unsigned offset = place.first - places.begin()->second.first;
    out.resize(offset + place.second);
    std::memcpy(&out[offset], parameters[ordinal], place.second);
  }
  return out;
}

}  // namespace

// ---- Functions that tests call.

/// Everything recorded so far. The text is valid until the next call.
EXPORT const char* stub_record() {
  static std::string copy;
  std::lock_guard<std::mutex> lock(mutex);
  copy = record;
  return copy.c_str();
}

EXPORT void stub_forget() {
  std::lock_guard<std::mutex> lock(mutex);
  record.clear();
}

/// Replaces STUB_CUDA_FAIL for later calls.
EXPORT void stub_fail(const char* failing) {
  std::lock_guard<std::mutex> lock(mutex);
  set_failures(failing);
}

/// 0: launches succeed without being recorded, so that only the runtime's own cost is measured.
EXPORT void stub_record_launches(int on) { recording = on; }

/// 1: behaves as if a global-mode stream capture were active, during which loading a module is an error.
EXPORT void stub_capture(int on) { capturing = on; }

EXPORT int stub_capture_mode() { return capture_mode; }

EXPORT int stub_context_depth() { return int(stack.size()); }

/// The device whose context is current in this thread; -1: none.
EXPORT int stub_current_device() { return current() ? current()->device : -1; }

/// Like cudaSetDevice of the CUDA runtime; -1 leaves the thread without a context.
EXPORT void stub_set_device(int device) {
  stack.clear();
  if (device >= 0 && device < int(devices().size())) stack.push_back(&contexts[device]);
}

// ---- The driver.

EXPORT int cuInit(unsigned) { return enter("cuInit"); }

EXPORT int cuDeviceGetCount(int* count) {
  int error = enter("cuDeviceGetCount");
  *count = int(devices().size());
  return error;
}

EXPORT int cuDeviceGet(int* device, int index) {
  if (int error = enter("cuDeviceGet", "device=" + std::to_string(index))) return error;
  if (index < 0 || index >= int(devices().size())) return refuse("cuDeviceGet", kInvalidDevice);
  *device = index;
  return 0;
}

EXPORT int cuDeviceGetName(char* name, int size, int device) {
  if (int error = enter("cuDeviceGetName")) return error;
  std::snprintf(name, size, "%s", devices().at(device).name.c_str());
  return 0;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (int error = enter("cuDeviceGetAttribute", "attribute=" + std::to_string(attribute))) return error;
  const Device& d = devices().at(device);
  if (attribute == 16)
    *value = d.multiprocessors;
  else if (attribute == 75)
    *value = d.major;
  else if (attribute == 76)
    *value = d.minor;
  else
    return refuse("cuDeviceGetAttribute", kInvalidValue);
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (int error = enter("cuDevicePrimaryCtxRetain", "device=" + std::to_string(device))) return error;
  *context = &contexts[device];
  return 0;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (int error = enter("cuCtxPushCurrent")) return error;
  stack.push_back(static_cast<Context*>(context));
  return 0;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (int error = enter("cuCtxPopCurrent")) return error;
  if (stack.empty()) return refuse("cuCtxPopCurrent", kInvalidContext);
  *context = stack.back();
  stack.pop_back();
  return 0;
}

EXPORT int cuCtxSetCurrent(void* context) {
  int device = static_cast<Context*>(context)->device;
  if (int error = enter("cuCtxSetCurrent", "device=" + std::to_string(device))) return error;
  if (stack.empty()) stack.push_back(nullptr);
  stack.back() = static_cast<Context*>(context);
  return 0;
}

EXPORT int cuCtxGetCurrent(void** context) {
  if (int error = enter("cuCtxGetCurrent")) return error;
  *context = current();
  return 0;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (int error = enter("cuThreadExchangeStreamCaptureMode", "mode=" + std::to_string(*mode))) return error;
  std::swap(capture_mode, *mode);
  return 0;
}

EXPORT int cuModuleLoadData(void** module, const void* data) {
  auto* image = static_cast<const char*>(data);
  std::string bytes(image, image_size(image));
  bool elf = bytes.compare(0, 4, "\177ELF") == 0;
  int device = stub_current_device();
  char facts[160];
  std::snprintf(
      facts, sizeof facts, "kind=%s bytes=%zu hash=%016llx device=%d mode=%d", elf ? "ELF" : "PTX", bytes.size(),
      (unsigned long long)fnv(bytes), device, capture_mode);
  if (int error = enter("cuModuleLoadData", facts)) return error;
  if (!current()) return refuse("cuModuleLoadData", kInvalidContext);
  if (capturing && capture_mode != 2) return refuse("cuModuleLoadData", 900);
  *module = new Module{device, std::move(bytes)};
  return 0;
}

EXPORT int cuModuleUnload(void* module) {
  if (int error = enter("cuModuleUnload")) return error;
  delete static_cast<Module*>(module);
  return 0;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* symbol) {
  if (int error = enter("cuModuleGetFunction", std::string("symbol=") + symbol)) return error;
  auto* loaded = static_cast<Module*>(module);
  if (loaded->image.find(symbol) == std::string::npos) return refuse("cuModuleGetFunction", kNotFound);
  *function = new Function{loaded, symbol, 48 << 10};
  return 0;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  const std::string facts = "attribute=" + std::to_string(attribute) + " value=" + std::to_string(value);
  if (int error = enter("cuFuncSetAttribute", facts)) return error;
  if (attribute != kDynamicShared) return refuse("cuFuncSetAttribute", kInvalidValue);
  static_cast<Function*>(function)->most_shared = value;
  return 0;
}

// Stores the arguments as the map: address, sizes, stride, tile, swizzle.
EXPORT int cuTensorMapEncodeTiled(
    uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
    const uint32_t* tile, const uint32_t* every, int interleave, int swizzle, int promotion, int fill) {
  if (int error = enter("cuTensorMapEncodeTiled")) return error;
  const bool known = type == 9 && rank == 2 && every[0] == 1 && every[1] == 1 && !interleave && promotion == 3 && !fill;
  const uint64_t start = reinterpret_cast<uintptr_t>(address);
  if (!known || start % 16 || strides[0] % 16 || tile[0] * 2 != (swizzle == 3 ? 128 : 64)) {
    return refuse("cuTensorMapEncodeTiled", kInvalidValue);
  }
  const uint64_t facts[16] = {start, sizes[0], sizes[1], strides[0], tile[0], tile[1], uint64_t(swizzle)};
  std::memcpy(map, facts, sizeof facts);
  return 0;
}

EXPORT int cuLaunchKernel(
    void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x, unsigned threads_y,
    unsigned threads_z, unsigned shared, void* stream, void** parameters, void** extra) {
  auto* function = static_cast<Function*>(handle);
  if (!current()) {
    enter("cuLaunchKernel", "context=none");
    return refuse("cuLaunchKernel", kInvalidContext);
  }
  if (int(shared) > function->most_shared) return refuse("cuLaunchKernel", kInvalidValue);
  if (!recording) return 0;
  // Keys in the list: 1 is the packed buffer, 2 the address of its size, 0 the end.
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; !parameters && extra && *extra; extra += 2) {
    if (*extra == reinterpret_cast<void*>(1)) buffer = extra[1];
    if (*extra == reinterpret_cast<void*>(2)) bytes = *static_cast<size_t*>(extra[1]);
  }
  std::string gathered;
  if (parameters) {
    gathered = gather(function->module->image, parameters);
    buffer = gathered.data();
    bytes = gathered.size();
  }
  std::ostringstream facts;
  facts << "symbol=" << function->symbol << " module=" << function->module->device << " device=" << current()->device
        << " grid=" << grid_x << "," << grid_y << "," << grid_z << " threads=" << threads_x << "," << threads_y << ","
        << threads_z << " shared=" << shared << " stream=" << reinterpret_cast<uintptr_t>(stream)
        << " args=" << hex(buffer, bytes);
  int error = enter("cuLaunchKernel", facts.str());
  if (error) return error;
  return function->module->device == current()->device ? 0 : refuse("cuLaunchKernel", kInvalidHandle);
}

EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (int error = enter("cuMemGetInfo")) return error;
  if (!current()) return refuse("cuMemGetInfo", kInvalidContext);
  *free = *total = size_t(1) << 30;
  return 0;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {100, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return *name ? 0 : kInvalidValue;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  static thread_local std::string answer;
  answer = "the stub's text for error " + std::to_string(error);
  *text = answer.c_str();
  return 0;
}
