#pragma once

// casting_mode, an option of the RMS norms: where a normalised row is rounded. "llama" rounds it before the weight is
// applied, as in Hugging Face's LlamaRMSNorm; "gemma" and "none" round once, at the end.

#include <string_view>

#include "core/checks.h"

namespace liger::core {

inline void check_casting_mode(const char* op, std::string_view mode) {
  LIGER_CHECK(
      mode == "llama" || mode == "gemma" || mode == "none", op, "casting_mode", "be 'llama', 'gemma' or 'none'", "'",
      mode, "'");
}

inline bool rounds_first(std::string_view mode) { return mode == "llama"; }

}  // namespace liger::core
