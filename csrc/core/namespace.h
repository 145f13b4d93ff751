#pragma once

#include <string>

namespace liger::core {

/// The operators are torch.ops.<kNamespace>.*. Only namespace.cpp contains the name: a copy of the library with another
/// namespace is linked from the same object files.
extern const char kNamespace[];

/// The name under which the dispatcher knows an operator.
inline std::string qualified(const std::string& op) { return std::string(kNamespace) + "::" + op; }

}  // namespace liger::core
