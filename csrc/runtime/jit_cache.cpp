#include "runtime/jit_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime/immortal.h"
#include "runtime/log.h"

namespace liger::runtime {
namespace {

std::mutex compiler_mutex;
std::string& compiler_name = immortal<std::string>();

bool private_folder(const std::string& path, bool create) {
  if (create) {
    for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
      mkdir(path.substr(0, slash).c_str(), 0700);
    }
    mkdir(path.c_str(), 0700);
  }
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) {
    std::string why = std::strerror(errno);
    if (create) log_once("JIT cache folder " + path + " cannot be created: " + why + "; compiled kernels are not kept");
    return false;
  }
  if (!S_ISDIR(info.st_mode)) {
    log_once("JIT cache folder " + path + " is not used: it must be a folder and not a link");
    return false;
  }
  // A kernel that another user could have written must never be loaded.
  if (info.st_uid != geteuid() || (info.st_mode & (S_IWGRP | S_IWOTH))) {
    log_once("JIT cache folder " + path + " is not used: it must belong to this user and not be writable by others");
    return false;
  }
  return true;
}

std::string newest_compiler(const std::string& folder) {
  std::string newest;
  if (DIR* listing = opendir(folder.c_str())) {
    while (dirent* item = readdir(listing)) {
      std::string name = item->d_name;
      if (name.rfind("triton-", 0) == 0 && strverscmp(name.c_str(), newest.c_str()) > 0) newest = name;
    }
    closedir(listing);
  }
  return newest;
}

}  // namespace

std::string JitCache::directory() {
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (auto chosen = variable("LIGER_OPS_CACHE_DIR"); !chosen.empty()) return chosen;
  if (auto cache = variable("XDG_CACHE_HOME"); !cache.empty()) return cache + "/liger_ops";
  if (auto home = variable("HOME"); !home.empty()) return home + "/.cache/liger_ops";
  return "";
}

void JitCache::set_compiler(const std::string& compiler) {
  std::lock_guard<std::mutex> lock(compiler_mutex);
  compiler_name = compiler;
}

std::string JitCache::path(const std::string& kernel, uint64_t hash, uint32_t variant, int arch, bool create) {
  std::string folder = directory(), compiler;
  {
    std::lock_guard<std::mutex> lock(compiler_mutex);
    compiler = compiler_name;
  }
  if (folder.empty() || !(create || access(folder.c_str(), F_OK) == 0)) return "";
  if (compiler.empty()) compiler = newest_compiler(folder);
  if (compiler.empty() || !private_folder(folder, create)) return "";
  folder += "/" + compiler;
  if (!(create || access(folder.c_str(), F_OK) == 0) || !private_folder(folder, create)) return "";
  char file[256];
  std::snprintf(
      file, sizeof file, "/%s-%016llx-%u-sm_%d.pack", kernel.c_str(), (unsigned long long)hash, variant, arch);
  return folder + file;
}

void JitCache::store(const std::string& path, const std::string& bytes) {
  std::string temporary = path + ".XXXXXX";
  int file = mkstemp(temporary.data());
  bool written = file >= 0;
  for (size_t done = 0; written && done < bytes.size();) {
    ssize_t count = write(file, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    written = count > 0;
    if (written) done += count;
  }
  if (file >= 0) written = close(file) == 0 && written;
  if (!written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    log_once("JIT cache file " + path + " could not be written: " + std::strerror(errno));
    if (file >= 0) unlink(temporary.c_str());
  }
}

}  // namespace liger::runtime
