// The replay as the Python module warpcheck.timing._replay.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "replay.hpp"

namespace py = pybind11;

namespace warpcheck::timing {
namespace {

template <class T>
std::vector<T> rows(const py::array& given) {
    const auto array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>(given);
    if (array.ndim() != 2 || size_t(array.shape(1)) * sizeof(int64_t) != sizeof(T))
        throw std::invalid_argument("an array of the replay has the wrong number of columns");
    std::vector<T> result(size_t(array.shape(0)));
    if (!result.empty()) std::memcpy(static_cast<void*>(result.data()), array.data(), result.size() * sizeof(T));
    return result;
}

Chip chip_from(const std::map<std::string, double>& numbers) {
    Chip chip;
#define X(name) \
    if (!numbers.count(#name)) throw std::invalid_argument("the chip's table has no " #name); \
    chip.name = numbers.at(#name);
    WARPCHECK_CHIP_NUMBERS(X)
#undef X
    return chip;
}

py::dict run(const std::map<std::string, double>& numbers, int64_t pipes, const py::array& slots, const py::array& instructions,
             const py::array& blocks, const std::vector<int32_t>& sources, const py::list& warps, const py::array& ctas, bool timeline, bool cold,
             const std::vector<std::tuple<int64_t, int64_t, double, bool>>& ranges, double limit) {
    Model model;
    model.pipes = pipes;
    model.slots = rows<Slot>(slots);
    model.instructions = rows<Instruction>(instructions);
    model.blocks = rows<Block>(blocks);
    model.sources = sources;
    model.block_at.assign(model.instructions.size(), -1);
    for (size_t b = 0; b < model.blocks.size(); ++b) model.block_at.at(size_t(model.blocks[b].begin)) = int32_t(b);
    std::vector<WarpInput> inputs;
    for (const py::handle& h : warps) {
        const auto t = py::reinterpret_borrow<py::tuple>(h);
        WarpInput w;
        w.cta = t[0].cast<uint32_t>(), w.warp = t[1].cast<uint32_t>(), w.sm = t[2].cast<uint32_t>();
        const std::string runs = t[3].cast<py::bytes>(), events = t[4].cast<py::bytes>();
        w.runs.resize(runs.size() / sizeof(WarpRecord::Run));
        std::memcpy(static_cast<void*>(w.runs.data()), runs.data(), runs.size());
        w.events.resize(events.size() / sizeof(TimedEvent));
        std::memcpy(static_cast<void*>(w.events.data()), events.data(), events.size());
        inputs.push_back(std::move(w));
    }
    const Chip chip = chip_from(numbers);
    const std::vector<CtaInput> places = rows<CtaInput>(ctas);
    Options options;
    options.timeline = timeline, options.cold = cold, options.limit = limit;
    for (const auto& [begin, end, sharers, from_dram] : ranges) options.ranges.push_back({begin, end, sharers, from_dram});
    Result r;
    {
        py::gil_scoped_release release;
        r = replay(model, chip, inputs, places, options);
    }
    py::dict result;
    result["cta_start"] = r.cta_start;
    result["cta_end"] = r.cta_end;
    result["busy"] = r.busy;
    result["pipe_busy"] = r.pipe_busy;
    result["waited"] = r.waited;
    result["products"] = r.products;
    py::list intervals;
    for (const Interval& i : r.intervals) intervals.append(py::make_tuple(i.track, i.sm, i.index, i.what, i.start, i.end));
    result["intervals"] = intervals;
    result["clocks"] = r.clocks;
    result["issued"] = r.issued;
    result["instructions"] = r.instructions;
    result["untied_events"] = r.untied_events;
    result["lost_events"] = r.lost_events;
    result["untied_instructions"] = r.untied_instructions;
    result["loads"] = r.loads;
    result["misses"] = r.misses;
    result["end"] = r.end;
    result["stuck"] = r.stuck;
    return result;
}

}  // namespace

PYBIND11_MODULE(_replay, m) {
    py::list names;
#define X(name) names.append(#name);
    WARPCHECK_CHIP_NUMBERS(X)
#undef X
    m.attr("CHIP_NUMBERS") = py::tuple(names);
    m.def("run", &run);
}

}  // namespace warpcheck::timing
