// Errors of the library: what is wrong, the value, what was expected, the fix, in one line.
#pragma once

#include <stdexcept>
#include <string>

namespace dsbd {

/// An error that the caller can fix: an option, a bundle, the memory.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The engine returned what no model may return, such as NaN.
class ModelError : public Error {
public:
    using Error::Error;
};

/// A constraint or a processor leaves a path no token, or breaks its word.
class ConstraintError : public Error {
public:
    using Error::Error;
};

/// The memory that a request may use does not suffice.
class CapacityError : public Error {
public:
    using Error::Error;
};

/// The caller has given the request up.
class Cancelled : public std::exception {
public:
    const char* what() const noexcept override { return "cancelled"; }
};

}  // namespace dsbd
