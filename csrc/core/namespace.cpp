#include "core/namespace.h"

namespace liger::core {

const char kNamespace[] = LIGER_NAMESPACE;

}  // namespace liger::core
