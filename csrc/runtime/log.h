#pragma once

#include <string>

namespace liger::runtime {

/// One line on standard error, the first time this text comes up in the process. LIGER_OPS_LOG=0 silences it.
void log_once(const std::string& text);

}  // namespace liger::runtime
