// The part of Python's C API that the modules need: owning references, conversions, errors as C++ exceptions. A binding
// library would take longer to compile than the engine.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace warpcheck::python {

// C++ exception that says: a Python exception is set.
struct Raised {};

inline PyObject* checked(PyObject* object) {
    if (!object) throw Raised{};
    return object;
}

inline void checked(int status) {
    if (status < 0) throw Raised{};
}

// Owning reference.
class Ref {
public:
    Ref() = default;
    explicit Ref(PyObject* owned) : object_(checked(owned)) {}
    Ref(const Ref& other) : object_(other.object_) { Py_XINCREF(object_); }
    Ref(Ref&& other) noexcept : object_(other.release()) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }

private:
    PyObject* object_ = nullptr;
};

inline Ref borrowed(PyObject* object) {
    Py_INCREF(checked(object));
    return Ref(object);
}

// Conversions from Python.

inline int64_t whole(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw Raised{};
    return value;
}

// Raises OverflowError if T cannot hold the value.
template <class T>
T number(PyObject* object) {
    const int64_t value = whole(object);
    if (int64_t(T(value)) == value && (value >= 0 || std::is_signed_v<T>)) return T(value);
    PyErr_SetString(PyExc_OverflowError, "a number is too large for the machine");
    throw Raised{};
}

inline uint64_t word(PyObject* object) {
    const Ref index(PyNumber_Index(object));     // also accepts NumPy's integers
    const unsigned long long value = PyLong_AsUnsignedLongLong(index.get());
    if (value == ~0ull && PyErr_Occurred()) throw Raised{};
    return value;
}

inline double real(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred()) throw Raised{};
    return value;
}

inline bool truth(PyObject* object) {
    const int value = PyObject_IsTrue(object);
    checked(value);
    return value;
}

inline std::string text(PyObject* object) {
    Py_ssize_t size = 0;
    const char* const raw = PyUnicode_AsUTF8AndSize(object, &size);
    if (!raw) throw Raised{};
    return std::string(raw, size_t(size));
}

inline std::pair<const char*, size_t> bytes(PyObject* object) {
    char* raw = nullptr;
    Py_ssize_t size = 0;
    checked(PyBytes_AsStringAndSize(object, &raw, &size));
    return {raw, size_t(size)};
}

// Item of a tuple, as a borrowed reference.
inline PyObject* item(PyObject* tuple, Py_ssize_t index) { return checked(PyTuple_GetItem(tuple, index)); }

// Calls `take` with each item of a sequence.
template <class F>
void each(PyObject* sequence, const F& take) {
    const Ref items(PySequence_Fast(sequence, "expected a sequence"));
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.get());
    for (Py_ssize_t i = 0; i < size; ++i) take(PySequence_Fast_GET_ITEM(items.get(), i));
}

// Calls `take` with each key and value of a dictionary.
template <class F>
void each_of_dict(PyObject* dict, const F& take) {
    PyObject *key = nullptr, *value = nullptr;
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "expected a dict");
        throw Raised{};
    }
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) take(key, value);
}

// Conversions to Python.

inline Ref none() { return borrowed(Py_None); }
inline Ref to_python(const Ref& object) { return object; }
inline Ref to_python(bool value) { return borrowed(value ? Py_True : Py_False); }
inline Ref to_python(double value) { return Ref(PyFloat_FromDouble(value)); }
inline Ref to_python(const char* value) { return Ref(PyUnicode_FromString(value)); }
inline Ref to_python(const std::string& value) { return Ref(PyUnicode_FromStringAndSize(value.data(), Py_ssize_t(value.size()))); }
template <class T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, int> = 0>
Ref to_python(T value) {
    if constexpr (std::is_signed_v<T>) return Ref(PyLong_FromLongLong(value));
    else return Ref(PyLong_FromUnsignedLongLong(value));
}
template <class T>
Ref to_python(const std::vector<T>& values);
template <class T, size_t n>
Ref to_python(const std::array<T, n>& values);
template <class T>
Ref to_python(const std::map<std::string, T>& values);

inline Ref raw_bytes(const void* data, size_t size) { return Ref(PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size))); }

template <class... T>
Ref tuple_of(const T&... values) {
    Ref tuple(PyTuple_New(sizeof...(values)));
    Py_ssize_t at = 0;
    (PyTuple_SET_ITEM(tuple.get(), at++, to_python(values).release()), ...);
    return tuple;
}

inline void append(const Ref& list, const Ref& value) { checked(PyList_Append(list.get(), value.get())); }

template <class T>
void put(const Ref& dict, const char* key, const T& value) {
    checked(PyDict_SetItemString(dict.get(), key, to_python(value).get()));
}

template <class It>
Ref list_of(It begin, It end) {
    Ref list(PyList_New(end - begin));
    for (Py_ssize_t i = 0; begin != end; ++begin) PyList_SET_ITEM(list.get(), i++, to_python(*begin).release());
    return list;
}

template <class T>
Ref to_python(const std::vector<T>& values) { return list_of(values.begin(), values.end()); }
template <class T, size_t n>
Ref to_python(const std::array<T, n>& values) { return list_of(values.begin(), values.end()); }
template <class T>
Ref to_python(const std::map<std::string, T>& values) {
    Ref dict(PyDict_New());
    for (const auto& [name, value] : values) put(dict, name.c_str(), value);
    return dict;
}

// C++ object in a Python capsule. Python owns it: `owned` is deleted with the capsule.
template <class T>
Ref capsule(const char* name, T* owned) {
    PyObject* const made = PyCapsule_New(owned, name, [](PyObject* self) { delete static_cast<T*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self))); });
    if (!made) delete owned;
    return Ref(made);
}

template <class T>
T& held(PyObject* capsule, const char* name) {
    void* const pointer = PyCapsule_GetPointer(capsule, name);
    if (!pointer) throw Raised{};
    return *static_cast<T*>(pointer);
}

// Releases the GIL during its lifetime.
class Released {
public:
    Released() : state_(PyEval_SaveThread()) {}
    ~Released() { PyEval_RestoreThread(state_); }
    // Calls `work` with the GIL.
    template <class F>
    void hold(const F& work) {
        const Held held(state_);
        work();
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

private:
    struct Held {
        explicit Held(PyThreadState*& state) : state_(state) { PyEval_RestoreThread(state_); }
        ~Held() { state_ = PyEval_SaveThread(); }
        PyThreadState*& state_;
    };
    PyThreadState* state_;
};

// Module function that takes the tuple of its arguments and converts C++ exceptions to Python's.
template <Ref (*function)(PyObject*)>
PyObject* call(PyObject*, PyObject* arguments) {
    try {
        return function(arguments).release();
    } catch (const Raised&) {
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::logic_error& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// Creates the module and calls `fill` to add its contents; the last call of a PyInit function.
template <class F>
PyObject* module(PyModuleDef& definition, const F& fill) {
    try {
        Ref made(PyModule_Create(&definition));
        fill([&](const char* name, const Ref& value) { checked(PyObject_SetAttrString(made.get(), name, value.get())); });
        return made.release();
    } catch (const Raised&) {
        return nullptr;
    }
}

}  // namespace warpcheck::python
