// Python module warpcheck.timing._replay: the replay.
#include "../../machine/core/python.hpp"

#include <cstring>

#include "replay.hpp"

namespace warpcheck::timing {
namespace {

using namespace python;

// View of the contiguous array of a Python object, valid during its lifetime.
class View {
public:
    explicit View(PyObject* object) { checked(PyObject_GetBuffer(object, &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)); }
    ~View() { PyBuffer_Release(&view_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    const Py_buffer& operator*() const { return view_; }

private:
    Py_buffer view_{};
};

// Rows of int64 as values of T.
template <class T>
std::vector<T> rows(PyObject* array) {
    const View view(array);
    const Py_buffer& b = *view;
    const bool is_int64 = b.itemsize == 8 && b.format && (!std::strcmp(b.format, "l") || !std::strcmp(b.format, "q"));
    if (!is_int64 || b.ndim != 2 || size_t(b.shape[1]) * sizeof(int64_t) != sizeof(T))
        throw std::invalid_argument("an array of the replay is not of int64, or has the wrong number of columns");
    std::vector<T> result(size_t(b.shape[0]));
    if (!result.empty()) std::memcpy(static_cast<void*>(result.data()), b.buf, result.size() * sizeof(T));
    return result;
}

template <class T>
std::vector<T> items_in(PyObject* raw) {
    const auto [data, size] = bytes(raw);
    std::vector<T> result(size / sizeof(T));
    if (!result.empty()) std::memcpy(static_cast<void*>(result.data()), data, result.size() * sizeof(T));
    return result;
}

Chip chip_from(PyObject* numbers) {
    Chip chip;
#define X(name) \
    if (PyObject* const value = PyDict_GetItemString(numbers, #name)) chip.name = real(value); \
    else throw std::invalid_argument("the chip's table has no " #name);
    WARPCHECK_CHIP_NUMBERS(X)
#undef X
    return chip;
}

// Runs a replay. Arguments: numbers of the chip; pipes; arrays of slots, instructions, blocks; row -> instruction;
// (CTA, warp, SM, runs, events) of each warp; array of CTAs; timeline; cold; ranges of addresses; limit.
Ref run(PyObject* arguments) {
    Model model;
    model.pipes = whole(item(arguments, 1));
    model.slots = rows<Slot>(item(arguments, 2));
    model.instructions = rows<Instruction>(item(arguments, 3));
    model.blocks = rows<Block>(item(arguments, 4));
    each(item(arguments, 5), [&](PyObject* source) { model.sources.push_back(number<int32_t>(source)); });
    model.block_at.assign(model.instructions.size(), -1);
    for (size_t b = 0; b < model.blocks.size(); ++b) model.block_at.at(size_t(model.blocks[b].begin)) = int32_t(b);
    std::vector<WarpInput> inputs;
    each(item(arguments, 6), [&](PyObject* t) {
        WarpInput w;
        w.cta = number<uint32_t>(item(t, 0)), w.warp = number<uint32_t>(item(t, 1)), w.sm = number<uint32_t>(item(t, 2));
        w.runs = items_in<WarpRecord::Run>(item(t, 3));
        w.events = items_in<TimedEvent>(item(t, 4));
        inputs.push_back(std::move(w));
    });
    const Chip chip = chip_from(item(arguments, 0));
    const std::vector<CtaInput> places = rows<CtaInput>(item(arguments, 7));
    Options options;
    options.timeline = truth(item(arguments, 8)), options.cold = truth(item(arguments, 9)), options.limit = real(item(arguments, 11));
    each(item(arguments, 10), [&](PyObject* t) { options.ranges.push_back({whole(item(t, 0)), whole(item(t, 1)), real(item(t, 2)), truth(item(t, 3))}); });
    Result r;
    {
        const Released others_run;
        r = replay(model, chip, inputs, places, options);
    }
    const Ref result(PyDict_New()), intervals(PyList_New(0));
    for (const Interval& i : r.intervals) append(intervals, tuple_of(i.track, i.sm, i.index, i.what, i.start, i.end));
    put(result, "intervals", intervals);
#define X(name) put(result, #name, r.name);
    X(cta_start) X(cta_end) X(busy) X(pipe_busy) X(waited) X(products) X(clocks) X(issued) X(instructions) X(untied_events)
    X(untied_instructions) X(loads) X(misses) X(end) X(stuck)
#undef X
    return result;
}

PyMethodDef functions[] = {
    {"run", call<run>, METH_VARARGS, "Give recorded warps their schedule."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_replay", "The replay.", -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace warpcheck::timing

PyMODINIT_FUNC PyInit__replay() {
    using namespace warpcheck::python;
    return module(warpcheck::timing::definition, [](const auto& add) {
        const Ref names(PyList_New(0));
#define X(name) append(names, to_python(#name));
        WARPCHECK_CHIP_NUMBERS(X)
#undef X
        add("CHIP_NUMBERS", Ref(PyList_AsTuple(names.get())));
    });
}
