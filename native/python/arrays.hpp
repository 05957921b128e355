// Arrays of numpy, and Python objects that the core holds.
#pragma once

#include <nanobind/nanobind.h>

#include "forward.hpp"

namespace dsbd::python {

namespace nb = nanobind;

/// A Python object that may be let go without the interpreter's lock.
class Held {
public:
    explicit Held(nb::object object) : object_(std::move(object)) {}
    Held(const Held&) = delete;
    ~Held() {
        nb::gil_scoped_acquire lock;
        object_.reset();
    }
    const nb::object& operator*() const { return object_; }
    const nb::object* operator->() const { return &object_; }

private:
    nb::object object_;
};
using HeldPointer = std::shared_ptr<const Held>;

inline HeldPointer held(nb::handle object) {
    return std::make_shared<const Held>(nb::borrow(object));
}

/// Whether Python takes an object for true.
inline bool is_true(nb::handle object) {
    const int found = PyObject_IsTrue(object.ptr());
    if (found < 0) throw nb::python_error();
    return found;
}

/// Set the error that Python raises next.
inline void set_error(nb::handle error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

/// The memory of an array in C order, as long as this lives.
template <class T>
class Memory {
public:
    Memory() = default;
    explicit Memory(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS)) throw nb::python_error();
        is_open_ = true;
    }
    Memory(Memory&& other) noexcept
        : view_(other.view_), is_open_(std::exchange(other.is_open_, false)) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(view_, other.view_);
        std::swap(is_open_, other.is_open_);
        return *this;
    }
    ~Memory() {
        if (is_open_) PyBuffer_Release(&view_);
    }
    T* data() const { return static_cast<T*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(T); }

private:
    Py_buffer view_{};
    bool is_open_ = false;
};

/// The functions and types of numpy that are used, and classes of the packages in Python.
struct Names {
    nb::object empty, contiguous, int64, float32, boolean;
    nb::object forward, row_sources, parent_features;
    nb::object decoding_error, constraint_error, model_error;

    static const Names& get();
};

/// Return whole numbers as an array, (n,) int64.
inline nb::object array_of(IntSpan numbers) {
    const Names& names = Names::get();
    nb::object array = names.empty(numbers.size(), names.int64);
    std::copy(numbers.begin(), numbers.end(), Memory<std::int64_t>(array).data());
    return array;
}

/// Return an array, of any whole numbers, as numbers.
inline Ints ints_of(nb::handle array) {
    const Names& names = Names::get();
    const nb::object plain = names.contiguous(array, names.int64);
    const Memory<const std::int64_t> memory(plain);
    return {memory.data(), memory.data() + memory.size()};
}

}  // namespace dsbd::python
