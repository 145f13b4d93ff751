#include "runtime/log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "runtime/immortal.h"

namespace liger::runtime {

void log_once(const std::string& text) {
  static std::mutex mutex;
  static auto& said = immortal<std::set<std::string>>();
  const char* level = std::getenv("LIGER_OPS_LOG");
  if (level && std::strcmp(level, "0") == 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(text).second) std::fprintf(stderr, "liger_ops: %s\n", text.c_str());
}

}  // namespace liger::runtime
