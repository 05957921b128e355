// What a bundle or a request is refused for.
#pragma once

#include <stdexcept>

namespace dsbd {

/// Its message says what is wrong, the value seen, the value expected and the fix.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

}  // namespace dsbd
