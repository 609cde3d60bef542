// The engine as the Python module warpcheck.machine._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine.hpp"

namespace py = pybind11;

namespace warpcheck {

void register_units(py::module_& m);

namespace {

// (kind, word offset, register number or -1, bits, negated)
Operand operand_from(const py::handle& h) {
    const auto t = py::reinterpret_borrow<py::tuple>(h);
    Operand o;
    o.kind = Operand::Kind(t[0].cast<int>());
    o.offset = t[1].cast<uint32_t>();
    o.id = t[2].cast<int32_t>();
    o.bits = uint8_t(t[3].cast<int>());
    o.negated = t[4].cast<bool>();
    return o;
}

// rows: (op, type, type2, destinations, sources, modifiers in the order of their record, guard, aligned, sync); constants: (value, offset, words);
// presets: (operand, code, value).
std::unique_ptr<Program> make_program(const py::list& rows, const py::list& constants, uint32_t constant_words, const py::list& presets,
                                      uint32_t register_words, uint32_t register_count, uint32_t local_bytes, uint32_t static_shared,
                                      uint32_t max_registers, std::map<uint32_t, std::string> barrier_names) {
    auto p = std::make_unique<Program>();
    for (const py::handle& row : rows) {
        const auto t = py::reinterpret_borrow<py::tuple>(row);
        Instr in;
        in.op = Op(t[0].cast<int>());
        in.type = Type(t[1].cast<int>());
        in.type2 = Type(t[2].cast<int>());
        in.first = uint32_t(p->operands.size());
        for (const py::handle& o : py::reinterpret_borrow<py::list>(t[3])) p->operands.push_back(operand_from(o));
        in.ndst = uint8_t(p->operands.size() - in.first);
        for (const py::handle& o : py::reinterpret_borrow<py::list>(t[4])) p->operands.push_back(operand_from(o));
        in.count = uint32_t(p->operands.size()) - in.first;
        in.modifiers.set(mod::kRecordOf[size_t(in.op)], t[5].cast<std::vector<int64_t>>());
        in.guard = operand_from(t[6]);
        in.aligned = t[7].cast<bool>();
        in.sync = t[8].cast<bool>();
        p->uses_wgmma |= in.op == Op::wgmma;
        p->code.push_back(in);
    }
    p->constants.resize(constant_words + 128);
    for (const py::handle& c : constants) {
        const auto t = py::reinterpret_borrow<py::tuple>(c);
        const auto value = t[0].cast<uint64_t>();
        const auto offset = t[1].cast<uint32_t>(), words = t[2].cast<uint32_t>();
        for (uint32_t l = 0; l < 32; ++l) {
            if (words == 1) p->constants[offset] = value & 1 ? ~0u : 0;
            else if (words >= 64) std::memcpy(&p->constants[offset + 2 * l], &value, 8);
            else p->constants[offset + l] = uint32_t(value);
        }
    }
    for (const py::handle& h : presets) {
        const auto t = py::reinterpret_borrow<py::tuple>(h);
        p->presets.push_back({operand_from(t[0]), Preset(t[1].cast<int>()), t[2].cast<uint64_t>()});
    }
    p->register_words = register_words;
    p->register_count = register_count;
    p->local_bytes = local_bytes;
    p->static_shared_bytes = static_shared;
    p->max_registers = max_registers;
    p->barrier_names = std::move(barrier_names);
    return p;
}

constexpr const char* kCheckNames[] = {
#define X(name, text) text,
    WARPCHECK_CHECKS(X)
#undef X
};

py::tuple place_tuple(const Place& p) { return py::make_tuple(p.row, p.cta, p.warp, p.lanes); }

py::tuple error_tuple(const SimError& e) {
    py::list others;
    for (auto& o : e.others) others.append(py::make_tuple(o.first, place_tuple(o.second)));
    return py::make_tuple(kCheckNames[int(e.check)], std::string(e.what()), place_tuple(e.place), others, e.barrier);
}

// Runs a launch; the result is a dictionary, with "error" when the kernel did something wrong.
py::dict run(const Program& program, const Config& config) {
    Engine engine(program, config);
    py::dict result;
    py::object error = py::none();
    try {
        py::gil_scoped_release release;
        engine.run();
    } catch (const SimError& e) {
        error = error_tuple(e);
    }
    py::list findings;
    for (const Finding& f : engine.findings()) findings.append(py::make_tuple(error_tuple(f.error), f.count));
    result["findings"] = findings;
    result["error"] = error;
    result["bytes"] = engine.counters.bytes;
    result["mma_flops"] = engine.counters.mma_flops;
    result["waits"] = engine.counters.waits;
    result["by_warp"] = engine.counters.by_warp;
    result["trace_hash"] = engine.trace_hash;
    if (engine.launched_dependents && config.check_races) result["touched"] = engine.touched();
    else result["touched"] = py::none();
    py::list trace;
    for (const TraceEvent& t : engine.trace) trace.append(py::make_tuple(t.time, t.cta, t.warp, t.row, t.count, std::string(t.what)));
    result["trace"] = trace;
    py::list records;   // (cta, warp, SM, executed, runs of rows, events), the last two as raw arrays
    for (const WarpRecord& r : engine.records)
        records.append(py::make_tuple(r.cta, r.warp, r.sm, r.executed,
                                      py::bytes(reinterpret_cast<const char*>(r.runs.data()), r.runs.size() * sizeof(WarpRecord::Run)),
                                      py::bytes(reinterpret_cast<const char*>(r.events.data()), r.events.size() * sizeof(TimedEvent))));
    result["records"] = records;
    return result;
}

template <class E>
py::dict names(std::initializer_list<const char*> list) {
    py::dict d;
    int i = 0;
    for (const char* name : list) d[name] = i++;
    return d;
}

// "A, B = 4, C" -> {"A": 0, "B": 4, "C": 5}
py::dict enumeration(const std::string& text) {
    py::dict d;
    int code = 0;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find(", ", at), text.size()), equals = text.find(" = ", at);
        if (equals < end) code = std::stoi(text.substr(equals + 3));
        d[py::str(text.substr(at, std::min(equals, end) - at))] = code++;
        at = end + 2;
    }
    return d;
}

// What the fields of a record take: "bool", "int", or the codes of an enumeration by name.
template <class T>
py::object field_values() {
    if constexpr (std::is_same_v<T, bool>) return py::str("bool");
    else if constexpr (std::is_same_v<T, int>) return py::str("int");
    else return enumeration(enumerators(T{}));
}

// The fields of a record in their order: name -> what it takes.
py::dict record_fields(mod::Record record) {
    py::dict d;
    switch (record) {
#define F(type, name) d[#name] = field_values<type>();
#define R(Name, fields) \
    case mod::Record::Name: fields(F) break;
        WARPCHECK_RECORDS(R)
#undef R
#undef F
    }
    return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
#define X(name, record) #name,
    m.attr("OPS") = names<Op>({WARPCHECK_OPS(X)});
#undef X
    py::dict modifiers;
#define X(name, record) modifiers[#name] = record_fields(mod::Record::record);
    WARPCHECK_OPS(X)
#undef X
    m.attr("MODIFIERS") = modifiers;
#define X(name) #name,
    m.attr("TYPES") = names<Type>({WARPCHECK_TYPES(X)});
#undef X
    m.attr("PRESETS") = names<Preset>({"TidX", "TidY", "TidZ", "NtidX", "NtidY", "NtidZ", "CtaidX", "CtaidY", "CtaidZ", "NctaidX", "NctaidY",
        "NctaidZ", "LaneId", "WarpId", "NwarpId", "SmId", "NsmId", "GridId", "ClusteridX", "ClusteridY", "ClusteridZ", "NclusteridX",
        "NclusteridY", "NclusteridZ", "ClusterCtaidX", "ClusterCtaidY", "ClusterCtaidZ", "ClusterNctaidX", "ClusterNctaidY", "ClusterNctaidZ",
        "ClusterCtarank", "ClusterNctarank", "IsExplicitCluster", "LanemaskEq", "LanemaskLe", "LanemaskLt", "LanemaskGe", "LanemaskGt",
        "DynamicSmemSize", "TotalSmemSize", "AggrSmemSize", "SharedSymbol", "Zero"});
    py::list checks;
    for (const char* name : kCheckNames) checks.append(name);
    m.attr("CHECKS") = py::tuple(checks);
    py::class_<Program>(m, "Program").def(py::init(&make_program));
    py::class_<Touched, std::shared_ptr<Touched>>(m, "Touched");
    py::class_<Config>(m, "Config")
        .def(py::init<>())
        .def_property("grid", [](Config&) { return 0; }, [](Config& c, std::array<uint32_t, 3> v) { std::copy(v.begin(), v.end(), c.grid); })
        .def_property("block", [](Config&) { return 0; }, [](Config& c, std::array<uint32_t, 3> v) { std::copy(v.begin(), v.end(), c.block); })
        .def_property("cluster", [](Config&) { return 0; }, [](Config& c, std::array<uint32_t, 3> v) { std::copy(v.begin(), v.end(), c.cluster); })
        .def_property("params", [](Config&) { return 0; }, [](Config& c, const py::bytes& b) {
            const std::string s = b;
            c.params.assign(s.begin(), s.end());
        })
        .def_property("regions", [](Config&) { return 0; }, [](Config& c, const std::vector<std::tuple<uint64_t, uint64_t, std::string>>& v) {
            c.regions.clear();
            for (auto& [base, bytes, name] : v) c.regions.push_back({base, bytes, name});
            std::sort(c.regions.begin(), c.regions.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
        })
        .def_property("schedule", [](Config&) { return 0; }, [](Config& c, int v) { c.schedule = Schedule(v); })
        .def_property("before", [](Config&) { return 0; }, [](Config& c, std::shared_ptr<Touched> v) { c.before = v; })
        .def_readwrite("overlaps", &Config::overlaps)
        .def_readwrite("explicit_cluster", &Config::explicit_cluster)
        .def_readwrite("dynamic_shared", &Config::dynamic_shared)
        .def_readwrite("sms", &Config::sms)
        .def_readwrite("shared_per_block", &Config::shared_per_block)
        .def_readwrite("shared_per_sm", &Config::shared_per_sm)
        .def_readwrite("registers_per_sm", &Config::registers_per_sm)
        .def_readwrite("threads_per_sm", &Config::threads_per_sm)
        .def_readwrite("blocks_per_sm", &Config::blocks_per_sm)
        .def_readwrite("has_tmem", &Config::has_tmem)
        .def_readwrite("arch", &Config::arch)
        .def_readwrite("seed", &Config::seed)
        .def_readwrite("check_bounds", &Config::check_bounds)
        .def_readwrite("check_poison", &Config::check_poison)
        .def_readwrite("check_races", &Config::check_races)
        .def_readwrite("check_tmem", &Config::check_tmem)
        .def_readwrite("check_letter", &Config::check_letter)
        .def_readwrite("check_leftovers", &Config::check_leftovers)
        .def_readwrite("order_by_letter", &Config::order_by_letter)
        .def_readwrite("collect", &Config::collect)
        .def_readwrite("off", &Config::off)
        .def_readwrite("trace", &Config::trace)
        .def_readwrite("timing", &Config::timing)
        .def_readwrite("limit", &Config::limit)
        .def_readwrite("resident", &Config::resident)
        .def_readwrite("cooperative", &Config::cooperative);
    m.def("run", &run);
    register_units(m);
}

}  // namespace warpcheck
