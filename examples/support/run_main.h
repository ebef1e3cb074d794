// Turns exceptions into an exit code, as a program launched on many ranks
// should.
#pragma once

#include <functional>

namespace examples {

// Runs `body` and returns its exit code. When it throws: prints
// `[rank R] error: TEXT` to standard error, without LibTorch's stack trace,
// leaves the text for torchrun in $TORCHELASTIC_ERROR_FILE (it then names this
// rank as the root cause and quotes the text), and returns 1.
int RunMain(const std::function<int()>& body) noexcept;

}  // namespace examples
