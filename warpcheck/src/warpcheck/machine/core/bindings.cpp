// Python module warpcheck.machine._core: the engine.
#include "python.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "engine.hpp"
#include "tensormap.hpp"

namespace warpcheck {
namespace {

using namespace python;

constexpr const char* kProgram = "warpcheck.Program";
constexpr const char* kTouched = "warpcheck.Touched";
using TouchedPtr = std::shared_ptr<Touched>;

// Operand from the tuple (kind, word offset, register number or -1, bits, negated).
Operand operand_from(PyObject* t) {
    Operand o;
    o.kind = Operand::Kind(whole(item(t, 0)));
    o.offset = number<uint32_t>(item(t, 1));
    o.id = number<int32_t>(item(t, 2));
    o.bits = number<uint8_t>(item(t, 3));
    o.negated = truth(item(t, 4));
    return o;
}

// Program from the tuple (rows, constants, constant words, presets, register words, register count, local bytes, static
// shared bytes, maximum registers, barrier names by offset, whether setmaxnreg has an effect).
// A row is (op, type, type2, destinations, sources, modifiers in the order of their record, guard, aligned, sync), a
// constant (value, offset, words), a preset (operand, code, value).
Ref make_program(PyObject* arguments) {
    auto p = std::make_unique<Program>();
    each(item(arguments, 0), [&](PyObject* t) {
        Instr in;
        in.op = Op(whole(item(t, 0)));
        in.type = Type(whole(item(t, 1)));
        in.type2 = Type(whole(item(t, 2)));
        in.first = uint32_t(p->operands.size());
        each(item(t, 3), [&](PyObject* o) { p->operands.push_back(operand_from(o)); });
        in.ndst = uint8_t(p->operands.size() - in.first);
        each(item(t, 4), [&](PyObject* o) { p->operands.push_back(operand_from(o)); });
        in.count = uint32_t(p->operands.size()) - in.first;
        std::vector<int64_t> modifiers;
        each(item(t, 5), [&](PyObject* value) { modifiers.push_back(whole(value)); });
        in.modifiers.set(mod::kRecordOf[size_t(in.op)], modifiers);
        in.guard = operand_from(item(t, 6));
        in.aligned = truth(item(t, 7));
        in.sync = truth(item(t, 8));
        p->uses_wgmma |= in.op == Op::wgmma;
        p->code.push_back(in);
    });
    if (p->code.size() > kRows) throw std::invalid_argument("the kernel has " + std::to_string(p->code.size()) + " instructions, expected at most " + std::to_string(kRows));
    p->constants.resize(number<uint32_t>(item(arguments, 2)) + 128);
    each(item(arguments, 1), [&](PyObject* t) {
        const uint64_t value = word(item(t, 0));
        const auto offset = number<uint32_t>(item(t, 1)), words = number<uint32_t>(item(t, 2));
        for (uint32_t l = 0; l < 32; ++l) {
            if (words == 1) p->constants[offset] = value & 1 ? ~0u : 0;
            else if (words >= 64) std::memcpy(&p->constants[offset + 2 * l], &value, 8);
            else p->constants[offset + l] = uint32_t(value);
        }
    });
    each(item(arguments, 3), [&](PyObject* t) { p->presets.push_back({operand_from(item(t, 0)), Preset(whole(item(t, 1))), word(item(t, 2))}); });
    p->register_words = number<uint32_t>(item(arguments, 4));
    p->register_count = number<uint32_t>(item(arguments, 5));
    p->local_bytes = number<uint32_t>(item(arguments, 6));
    p->static_shared_bytes = number<uint32_t>(item(arguments, 7));
    p->max_registers = number<uint32_t>(item(arguments, 8));
    each_of_dict(item(arguments, 9), [&](PyObject* offset, PyObject* name) { p->barrier_names[number<uint32_t>(offset)] = text(name); });
    p->moves_registers = truth(item(arguments, 10));
    return capsule(kProgram, p.release());
}

constexpr const char* kCheckNames[] = {
#define X(name, text) text,
    WARPCHECK_CHECKS(X)
#undef X
};

Ref place_tuple(const Place& p) { return tuple_of(p.row, p.cta, p.warp, p.lanes); }

Ref error_tuple(const SimError& e) {
    const Ref others(PyList_New(0));
    for (auto& o : e.others) append(others, tuple_of(o.first, place_tuple(o.second)));
    return tuple_of(kCheckNames[int(e.check)], e.what(), place_tuple(e.place), others, e.barrier);
}

// Config from a dictionary whose keys are the fields of `Config`. Fields without a key keep their defaults.
Config config_from(PyObject* options) {
    Config c;
    each_of_dict(options, [&](PyObject* key, PyObject* value) {
        const std::string name = text(key);
        const auto extents = [&](uint32_t (&to)[3]) {
            for (int i = 0; i < 3; ++i) to[i] = number<uint32_t>(item(value, i));
        };
        if (name == "params") {
            const auto [raw, size] = bytes(value);
            c.params.assign(raw, raw + size);
        } else if (name == "regions") {
            each(value, [&](PyObject* t) {      // (address, bytes, name, address of the bytes on the host)
                c.regions.push_back({word(item(t, 0)), word(item(t, 1)), text(item(t, 2)), reinterpret_cast<uint8_t*>(word(item(t, 3)))});
                c.moved |= word(item(t, 3)) != word(item(t, 0));
            });
            std::sort(c.regions.begin(), c.regions.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
        } else if (name == "outputs") {     // (address, bytes, address of the record of writes)
            each(value, [&](PyObject* t) { c.outputs.push_back({word(item(t, 0)), word(item(t, 1)), reinterpret_cast<uint8_t*>(word(item(t, 2)))}); });
        } else if (name == "clusters") {
            each(value, [&](PyObject* n) { c.clusters.push_back(word(n)); });
        } else if (name == "before") {
            if (value != Py_None) c.before = held<TouchedPtr>(value, kTouched);
        } else if (name == "schedule") {
            c.schedule = Schedule(whole(value));
        } else if (name == "max_seconds") {
            c.max_seconds = real(value);
        }
#define EXTENTS(field) else if (name == #field) extents(c.field);
#define NUMBER(field) else if (name == #field) c.field = number<decltype(c.field)>(value);
#define WORD(field) else if (name == #field) c.field = word(value);
#define FLAG(field) else if (name == #field) c.field = truth(value);
        EXTENTS(grid) EXTENTS(block) EXTENTS(cluster)
        NUMBER(dynamic_shared) NUMBER(sms) NUMBER(shared_per_block) NUMBER(shared_per_sm) NUMBER(registers_per_sm)
        NUMBER(threads_per_sm) NUMBER(blocks_per_sm) NUMBER(arch) NUMBER(resident)
        WORD(seed) WORD(off) WORD(max_instructions)
        FLAG(explicit_cluster) FLAG(check_bounds) FLAG(check_poison) FLAG(check_races) FLAG(check_tmem)
        FLAG(check_letter) FLAG(check_leftovers) FLAG(order_by_letter) FLAG(collect) FLAG(trace) FLAG(timing)
        FLAG(cooperative) FLAG(overlaps)
        else throw std::invalid_argument("a launch has no " + name);
#undef FLAG
#undef WORD
#undef NUMBER
#undef EXTENTS
    });
    return c;
}

constexpr double kSecondsPerTick = 0.25;

// Runs a launch: program, fields of `Config`, and a function that is called several times a second with the
// instructions executed, the seconds so far, the clusters that have ended, and all clusters. Returns a dictionary; it
// has the key "error" if a finding ended the run.
Ref run(PyObject* arguments) {
    const Config config = config_from(item(arguments, 1));
    Engine engine(held<Program>(item(arguments, 0), kProgram), config);
    const Ref result(PyDict_New());
    put(result, "error", none());
    std::unique_ptr<SimError> stopped;
    bool interrupted = false;
    {
        Released others_run;
        double last = 0;
        engine.tick = [&](double seconds, uint64_t ended, uint64_t clusters) {
            if (seconds < last + kSecondsPerTick) return;
            last = seconds;
            others_run.hold([&] {
                checked(PyErr_CheckSignals());
                Ref(PyObject_CallObject(item(arguments, 2), tuple_of(engine.executed, seconds, ended, clusters).get()));
            });
        };
        try {
            engine.run();
        } catch (const SimError& e) {
            stopped = std::make_unique<SimError>(e);
        } catch (const Raised&) {
            interrupted = true;
        }
    }
    if (interrupted) throw Raised{};
    if (stopped) put(result, "error", error_tuple(*stopped));
    const Ref findings(PyList_New(0)), trace(PyList_New(0)), records(PyList_New(0));
    for (const Finding& f : engine.findings()) append(findings, tuple_of(error_tuple(f.error), f.count));
    put(result, "findings", findings);
    put(result, "bytes", engine.counters.bytes);
    put(result, "mma_flops", engine.counters.mma_flops);
    put(result, "waits", engine.counters.waits);
    put(result, "by_warp", engine.counters.by_warp);
    put(result, "trace_hash", engine.trace_hash);
    put(result, "clock_slots", engine.clock_slots());
    const bool may_overlap = engine.launched_dependents && config.check_races;
    put(result, "touched", may_overlap ? capsule(kTouched, new TouchedPtr(engine.touched())) : none());
    for (const TraceEvent& t : engine.trace) append(trace, tuple_of(t.time, t.cta, t.warp, t.row, t.count, t.what));
    put(result, "trace", trace);
    // (cta, warp, SM, executed, runs of rows, events); runs and events are bytes of the raw arrays
    for (const WarpRecord& r : engine.records)
        append(records, tuple_of(r.cta, r.warp, r.sm, r.executed, raw_bytes(r.runs.data(), r.runs.size() * sizeof(WarpRecord::Run)),
                                 raw_bytes(r.events.data(), r.events.size() * sizeof(TimedEvent))));
    put(result, "records", records);
    return result;
}

// Returns the 128 bytes of a tensor map. Takes a dictionary with base, type, extent, stride and box; other fields
// default to 0, element_stride to 1.
Ref encode_map(PyObject* arguments) {
    TensorMap m;
    bool has_steps = false;
    each_of_dict(item(arguments, 0), [&](PyObject* key, PyObject* value) {
        const std::string name = text(key);
        const auto per_axis = [&](auto& to) {
            size_t axis = 0;
            each(value, [&](PyObject* extent) {
                if (axis == std::size(to)) throw std::invalid_argument("a tensor map has at most 5 axes");
                to[axis++] = std::remove_reference_t<decltype(to[0])>(word(extent));
            });
            return axis;
        };
        if (name == "base") m.base = word(value);
        else if (name == "type") m.type = TmaType(whole(value));
        else if (name == "tf32") m.tf32 = truth(value);
        else if (name == "swizzle") m.swizzle = TmaSwizzle(whole(value));
        else if (name == "atomicity") m.atomicity = TmaAtomicity(whole(value));
        else if (name == "interleave") m.interleave = TmaInterleave(whole(value));
        else if (name == "nan_fill") m.nan_fill = truth(value);
        else if (name == "extent") m.rank = uint8_t(per_axis(m.extent));
        else if (name == "stride") per_axis(m.stride);
        else if (name == "box") per_axis(m.box);
        else if (name == "element_stride") has_steps = per_axis(m.element_stride);
        else throw std::invalid_argument("a tensor map has no " + name);
    });
    if (!has_steps) std::fill_n(m.element_stride, m.rank, 1);
    uint8_t raw[128];
    encode_tensormap(m, raw);
    return raw_bytes(raw, sizeof raw);
}

template <size_t n>
Ref names(const char* const (&list)[n]) {
    const Ref d(PyDict_New());
    for (size_t i = 0; i < n; ++i) put(d, list[i], i);
    return d;
}

// Parses the text of an enumeration: "A, B = 4, C" -> {"A": 0, "B": 4, "C": 5}.
Ref enumeration(const std::string& text) {
    const Ref d(PyDict_New());
    int code = 0;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find(", ", at), text.size()), equals = text.find(" = ", at);
        if (equals < end) code = std::stoi(text.substr(equals + 3));
        put(d, text.substr(at, std::min(equals, end) - at).c_str(), code++);
        at = end + 2;
    }
    return d;
}

// Field of a modifier record, with its type: "bool", "int", or the enumerators.
struct Field {
    const char *name, *values;
};

template <class T>
constexpr const char* values_of() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    else if constexpr (std::is_same_v<T, int>) return "int";
    else return enumerators(T{});
}

std::vector<Field> fields_of(mod::Record record) {
    switch (record) {
#define F(type, name) {#name, values_of<type>()},
#define R(Name, fields) \
    case mod::Record::Name: return {fields(F)};
        WARPCHECK_RECORDS(R)
#undef R
#undef F
    }
    return {};
}

// Fields of a record, in order: name -> type. An enumeration is a dictionary of its codes by name.
Ref record_fields(mod::Record record) {
    const Ref d(PyDict_New());
    for (const Field& field : fields_of(record)) {
        const std::string values = field.values;
        put(d, field.name, values == "bool" || values == "int" ? to_python(values) : enumeration(values));
    }
    return d;
}

constexpr const char* kOpNames[] = {
#define X(name, record) #name,
    WARPCHECK_OPS(X)
#undef X
};
constexpr const char* kTypeNames[] = {
#define X(name) #name,
    WARPCHECK_TYPES(X)
#undef X
};
constexpr const char* kPresetNames[] = {
    "TidX", "TidY", "TidZ", "NtidX", "NtidY", "NtidZ", "CtaidX", "CtaidY", "CtaidZ", "NctaidX", "NctaidY",
    "NctaidZ", "LaneId", "WarpId", "NwarpId", "SmId", "NsmId", "GridId", "ClusteridX", "ClusteridY", "ClusteridZ", "NclusteridX",
    "NclusteridY", "NclusteridZ", "ClusterCtaidX", "ClusterCtaidY", "ClusterCtaidZ", "ClusterNctaidX", "ClusterNctaidY", "ClusterNctaidZ",
    "ClusterCtarank", "ClusterNctarank", "IsExplicitCluster", "LanemaskEq", "LanemaskLe", "LanemaskLt", "LanemaskGe", "LanemaskGt",
    "DynamicSmemSize", "TotalSmemSize", "AggrSmemSize", "SharedSymbol", "Zero"};

PyMethodDef functions[] = {
    {"Program", call<make_program>, METH_VARARGS, "A lowered kernel, for `run`."},
    {"run", call<run>, METH_VARARGS, "Run a launch of a program."},
    {"encode_tensormap", call<encode_map>, METH_VARARGS, "The bytes of a tensor map."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "The engine.", -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace warpcheck

PyMODINIT_FUNC PyInit__core() {
    using namespace warpcheck;
    return module(definition, [](const auto& add) {
        add("OPS", names(kOpNames));
        add("TYPES", names(kTypeNames));
        add("PRESETS", names(kPresetNames));
        const Ref modifiers(PyDict_New());
        for (size_t i = 0; i < std::size(kOpNames); ++i) put(modifiers, kOpNames[i], record_fields(mod::kRecordOf[i]));
        add("MODIFIERS", modifiers);
        const Ref checks(PyTuple_New(std::size(kCheckNames)));
        for (size_t i = 0; i < std::size(kCheckNames); ++i) PyTuple_SET_ITEM(checks.get(), Py_ssize_t(i), to_python(kCheckNames[i]).release());
        add("CHECKS", checks);
    });
}
