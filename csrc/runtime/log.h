#pragma once

#include <string>

namespace liger::runtime {

/// Writes one line to standard error, once per text and process. LIGER_OPS_LOG=0 silences it.
void log_once(const std::string& text);

}  // namespace liger::runtime
