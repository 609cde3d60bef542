// Python module warpcheck.machine._units: the units as functions on NumPy arrays, for their tests. Wheels do not
// contain it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mma_sync.hpp"
#include "tma.hpp"
#include "tmem.hpp"
#include "umma.hpp"
#include "wgmma.hpp"

namespace py = pybind11;

namespace warpcheck {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Words = py::array_t<uint32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Registers of a warp, from an array of (registers, 32) uint32.
struct RegisterRows {
    std::vector<uint32_t*> rows;
    explicit RegisterRows(Words& words) {
        for (py::ssize_t r = 0; r < words.shape(0); ++r) rows.push_back(words.mutable_data(r, 0));
    }
    uint32_t* const* data() const { return rows.data(); }
};

Words make_registers(uint32_t count) {
    Words words({count, 32u});
    std::fill_n(words.mutable_data(), size_t(count) * 32, 0u);
    return words;
}

CtaMemory memory_of(Bytes& shared, Words* tmem) {
    return {shared.mutable_data(), uint32_t(shared.size()), tmem ? tmem->mutable_data() : nullptr};
}

template <class T>
T get(const py::dict& d, const char* key, T fallback) {
    return d.contains(key) ? d[key].cast<T>() : fallback;
}

py::list footprint_list(const Footprint& f) {
    py::list out;
    for (const SharedRange& r : f.shared) out.append(py::make_tuple("shared", r.cta, r.offset, r.bytes, r.write));
    for (const TmemRect& r : f.tmem) out.append(py::make_tuple("tmem", r.cta, r.lane, r.lanes, r.column, r.columns, r.write));
    return out;
}

// Float formats.

template <class F>
float decode_one(uint32_t code) { return decode_float<F>(code); }
template <class F>
uint32_t encode_one(float v, Round round, bool sat) { return encode_float<F>(v, round, sat); }

struct NamedFormat {
    const char* name;
    float (*decode)(uint32_t);
    uint32_t (*encode)(float, Round, bool);
};

const NamedFormat& format_of(const std::string& name) {
    static const NamedFormat formats[] = {
        {"f16", decode_one<F16>, encode_one<F16>},
        {"bf16", decode_one<BF16>, encode_one<BF16>},
        {"tf32", tf32_to_float, float_to_tf32},
        {"e4m3", decode_one<E4M3>, encode_one<E4M3>},
        {"e5m2", decode_one<E5M2>, encode_one<E5M2>},
        {"e2m1", decode_one<E2M1>, encode_one<E2M1>},
        {"e2m3", decode_one<E2M3>, encode_one<E2M3>},
        {"e3m2", decode_one<E3M2>, encode_one<E3M2>},
        {"ue4m3", [](uint32_t c) { return scale_to_float(uint8_t(c), ScaleType::UE4M3); }, encode_one<E4M3>},
        {"ue8m0", [](uint32_t c) { return ue8m0_to_float(uint8_t(c)); },
         [](float v, Round r, bool s) { return uint32_t(float_to_ue8m0(v, r, s)); }},
    };
    for (const NamedFormat& f : formats) if (name == f.name) return f;
    throw py::value_error("unknown float format " + name);
}

Round round_of(const std::string& name) {
    if (name == "rn") return Round::NearestEven;
    if (name == "rz") return Round::Zero;
    if (name == "rm") return Round::Down;
    if (name == "rp") return Round::Up;
    if (name == "rna") return Round::NearestAway;
    throw py::value_error("unknown rounding " + name);
}

Floats decode_floats(const std::string& format, Words codes) {
    const NamedFormat& f = format_of(format);
    Floats out(std::vector<py::ssize_t>(codes.shape(), codes.shape() + codes.ndim()));
    for (py::ssize_t i = 0; i < codes.size(); ++i) out.mutable_data()[i] = f.decode(codes.data()[i]);
    return out;
}

Words encode_floats(const std::string& format, Floats values, const std::string& round, bool satfinite) {
    const NamedFormat& f = format_of(format);
    const Round mode = round_of(round);
    Words out(std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
    for (py::ssize_t i = 0; i < values.size(); ++i) out.mutable_data()[i] = f.encode(values.data()[i], mode, satfinite);
    return out;
}

// Tensor maps and tensor copies.

TensorMap map_of(const py::bytes& bytes) {
    const std::string raw = bytes;
    if (raw.size() < 64) throw py::value_error("a tensor map has 128 bytes, got " + std::to_string(raw.size()));
    return decode_tensormap(reinterpret_cast<const uint8_t*>(raw.data()));
}

py::dict decode_map(const py::bytes& bytes) {
    const TensorMap m = map_of(bytes);
    py::dict d;
    d["base"] = m.base;
    d["rank"] = m.rank;
    d["type"] = int(m.type);
    d["tf32"] = m.tf32;
    d["swizzle"] = int(m.swizzle);
    d["atomicity"] = int(m.atomicity);
    d["interleave"] = int(m.interleave);
    d["nan_fill"] = m.nan_fill;
    d["extent"] = std::vector<uint64_t>(m.extent, m.extent + m.rank);
    d["stride"] = std::vector<uint64_t>(m.stride, m.stride + m.rank);
    d["box"] = std::vector<uint32_t>(m.box, m.box + m.rank);
    d["element_stride"] = std::vector<uint32_t>(m.element_stride, m.element_stride + m.rank);
    return d;
}

py::bytes replace_map(const py::bytes& bytes, int field, uint32_t ordinal, uint64_t value) {
    std::string raw = bytes;
    tensormap_replace(reinterpret_cast<uint8_t*>(raw.data()), TensorMapField(field), ordinal, value);
    return py::bytes(raw);
}

std::vector<TmaPiece> pieces_of(const TensorMap& map, const std::vector<int32_t>& coords, uint32_t shared, bool gather4) {
    int32_t c[5] = {};
    std::copy_n(coords.begin(), std::min<size_t>(5, coords.size()), c);
    std::vector<TmaPiece> pieces;
    gather4 ? tma_pieces_gather4(map, c, shared, pieces) : tma_pieces(map, c, shared, pieces);
    return pieces;
}

void tma_load(const py::bytes& bytes, const std::vector<int32_t>& coords, Bytes shared, uint32_t offset, bool gather4) {
    const TensorMap map = map_of(bytes);
    for (const TmaPiece& p : pieces_of(map, coords, offset, gather4)) {
        if (p.shared + p.bytes > shared.size()) throw py::value_error("box leaves the shared array");
        tma_load_piece(map, p, reinterpret_cast<const uint8_t*>(p.global), shared.mutable_data());
    }
}

void tma_store(const py::bytes& bytes, const std::vector<int32_t>& coords, Bytes shared, uint32_t offset, bool scatter4,
               int reduce) {
    const TensorMap map = map_of(bytes);
    for (const TmaPiece& p : pieces_of(map, coords, offset, scatter4)) {
        if (reduce < 0) tma_store_piece(map, p, shared.data(), reinterpret_cast<uint8_t*>(p.global));
        else if (!p.fill) reduce_bytes(ReduceOp(reduce), map.type, reinterpret_cast<uint8_t*>(p.global), shared.data() + p.shared, p.bytes);
    }
}

// Tensor memory.

TmemAccess access_of(int shape, uint16_t num, bool pack16, uint32_t taddr, uint32_t split) {
    return {TmemShape(shape), num, pack16, taddr, split};
}

Words tmem_ld(Words tmem, int shape, uint16_t num, bool pack16, uint32_t taddr, uint32_t split) {
    const TmemAccess a = access_of(shape, num, pack16, taddr, split);
    Words regs = make_registers(tmem_registers(a));
    tmem_load(a, tmem.data(), RegisterRows(regs).data());
    return regs;
}

void tmem_st(Words tmem, Words regs, int shape, uint16_t num, bool pack16, uint32_t taddr, uint32_t split) {
    tmem_store(access_of(shape, num, pack16, taddr, split), tmem.mutable_data(), RegisterRows(regs).data());
}

py::list tmem_rects(int shape, uint16_t num, bool pack16, uint32_t taddr, uint32_t split, bool write) {
    Footprint f;
    tmem_footprint(access_of(shape, num, pack16, taddr, split), write, f.tmem);
    return footprint_list(f);
}

// Memories of a CTA pair; `shared` and `tmem` are lists with one array per CTA.
struct Pair {
    std::vector<Bytes> shared;
    std::vector<Words> tmem;
    CtaMemory ctas[2];
    Pair(const py::list& shared_list, const py::list& tmem_list) {
        for (size_t i = 0; i < shared_list.size(); ++i) {
            shared.push_back(shared_list[i].cast<Bytes>());
            tmem.push_back(tmem_list[i].cast<Words>());
            ctas[i] = memory_of(shared.back(), &tmem.back());
        }
    }
};

py::list tmem_cp(const py::list& shared, const py::list& tmem, int shape, int format, uint32_t taddr, uint64_t desc) {
    Pair pair(shared, tmem);
    const TmemCopyOp op{TmemCopyShape(shape), TmemCopyFormat(format), uint8_t(shared.size()), taddr, desc};
    Footprint f;
    tmem_copy_footprint(op, f);
    tmem_copy_execute(op, pair.ctas);
    return footprint_list(f);
}

py::list tmem_shift(const py::list& shared, const py::list& tmem, uint32_t taddr) {
    Pair pair(shared, tmem);
    const TmemShiftOp op{uint8_t(shared.size()), taddr};
    Footprint f;
    tmem_shift_footprint(op, f);
    tmem_shift_execute(op, pair.ctas);
    return footprint_list(f);
}

// Matrix operations.

UmmaOp umma_of(const py::dict& d) {
    UmmaOp op;
    op.kind = MmaKind(d["kind"].cast<int>());
    op.cta_group = get<uint8_t>(d, "cta_group", 1);
    op.weight_stationary = get(d, "weight_stationary", false);
    op.a_in_tmem = d.contains("a_tmem");
    op.accumulate = get(d, "accumulate", false);
    op.scale_d = get<uint8_t>(d, "scale_d", 0);
    op.d_tmem = get<uint32_t>(d, "d_tmem", 0);
    op.a_tmem = get<uint32_t>(d, "a_tmem", 0);
    op.a_desc = get<uint64_t>(d, "a_desc", 0);
    op.b_desc = get<uint64_t>(d, "b_desc", 0);
    op.idesc = d["idesc"].cast<uint32_t>();
    const auto lanes = get(d, "disable_lane", std::vector<uint32_t>());
    std::copy(lanes.begin(), lanes.end(), op.disable_lane);
    op.scale_vector = get<uint8_t>(d, "scale_vector", 0);
    op.scale_a_tmem = get<uint32_t>(d, "scale_a_tmem", 0);
    op.scale_b_tmem = get<uint32_t>(d, "scale_b_tmem", 0);
    return op;
}

py::list umma(const py::dict& d, const py::list& shared, const py::list& tmem) {
    Pair pair(shared, tmem);
    const UmmaOp op = umma_of(d);
    Footprint f;
    umma_footprint(op, f);
    umma_execute(op, pair.ctas);
    return footprint_list(f);
}

MmaType type_of(const std::string& name) {
    static const char* const names[] = {"f16", "bf16", "tf32", "f64", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1", "f32",
                                        "s32", "e2m1", "e2m3", "e3m2"};
    for (size_t i = 0; i < std::size(names); ++i) if (name == names[i]) return MmaType(i);
    throw py::value_error("unknown matrix element type " + name);
}

py::list wgmma(const py::dict& d, Bytes shared, py::object a_regs, Words d_regs) {
    WgmmaOp op{type_of(d["d_type"].cast<std::string>()), type_of(d["a_type"].cast<std::string>()),
               type_of(d["b_type"].cast<std::string>()), d["n"].cast<uint16_t>()};
    op.a_in_registers = !a_regs.is_none();
    op.accumulate = get(d, "accumulate", true);
    op.negate_a = get(d, "negate_a", false);
    op.negate_b = get(d, "negate_b", false);
    op.mn_major_a = get(d, "mn_major_a", false);
    op.mn_major_b = get(d, "mn_major_b", false);
    op.saturate = get(d, "saturate", false);
    op.a_desc = get<uint64_t>(d, "a_desc", 0);
    op.b_desc = d["b_desc"].cast<uint64_t>();
    Words a = op.a_in_registers ? a_regs.cast<Words>() : make_registers(16);
    Footprint f;
    wgmma_footprint(op, f.shared);
    wgmma_execute(op, memory_of(shared, nullptr), RegisterRows(a).data(), RegisterRows(d_regs).data());
    return footprint_list(f);
}

// `scale_a` and `scale_b`: the values of the threads, the byte and the thread that are selected.
MmaScales scales_of(const py::dict& d, const char* key, Words& data) {
    if (!d.contains(key)) return {};
    const auto [words, byte, thread] = d[key].cast<std::tuple<Words, uint32_t, uint32_t>>();
    data = words;
    return {data.data(), byte, thread};
}

Words mma(const py::dict& d, Words a, Words b, Words c) {
    MmaSyncOp op{d["m"].cast<uint16_t>(), d["n"].cast<uint16_t>(), d["k"].cast<uint16_t>(),
                 type_of(d["d_type"].cast<std::string>()), type_of(d["a_type"].cast<std::string>()),
                 type_of(d["b_type"].cast<std::string>()), type_of(d["c_type"].cast<std::string>())};
    op.saturate = get(d, "saturate", false);
    op.containers = get(d, "containers", false);
    op.arch = get<uint16_t>(d, "arch", 100);
    op.scale_vector = get<uint8_t>(d, "scale_vector", 0);
    op.scale_type = get(d, "ue4m3", false) ? ScaleType::UE4M3 : ScaleType::UE8M0;
    Words scale_a, scale_b;
    const MmaScales scales[] = {scales_of(d, "scale_a", scale_a), scales_of(d, "scale_b", scale_b)};
    if (a.shape(0) != mma_sync_registers_a(op) || b.shape(0) != mma_sync_registers_b(op) || c.shape(0) != mma_sync_registers_c(op))
        throw py::value_error("registers of A, B, C: expected " + std::to_string(mma_sync_registers_a(op)) + ", " +
                              std::to_string(mma_sync_registers_b(op)) + ", " + std::to_string(mma_sync_registers_c(op)));
    Words out = make_registers(mma_sync_registers_d(op));
    mma_sync_execute(op, RegisterRows(a).data(), RegisterRows(b).data(), RegisterRows(c).data(), RegisterRows(out).data(), scales[0], scales[1]);
    return out;
}

Words ldmatrix(Bytes shared, const std::vector<uint32_t>& addresses, int shape, uint8_t num, bool trans) {
    const LdMatrixOp op{MatrixShape(shape), num, trans};
    const uint8_t* rows[32] = {};
    for (uint32_t i = 0; i < ldmatrix_rows(op); ++i) rows[i] = shared.data() + addresses.at(i);
    Words regs = make_registers(ldmatrix_registers(op));
    ldmatrix_execute(op, rows, RegisterRows(regs).data());
    return regs;
}

void stmatrix(Bytes shared, const std::vector<uint32_t>& addresses, Words regs, int shape, uint8_t num, bool trans) {
    const LdMatrixOp op{MatrixShape(shape), num, trans};
    uint8_t* rows[32] = {};
    for (uint32_t i = 0; i < ldmatrix_rows(op); ++i) rows[i] = shared.mutable_data() + addresses.at(i);
    stmatrix_execute(op, rows, RegisterRows(regs).data());
}

Words movmatrix(Words source) {
    Words out = make_registers(1);
    movmatrix_execute(source.data(), out.mutable_data());
    return out;
}

}  // namespace

PYBIND11_MODULE(_units, m) {
    py::register_exception<UnitError>(m, "UnitError", PyExc_ValueError);
    m.def("decode_floats", decode_floats);
    m.def("encode_floats", encode_floats, py::arg("format"), py::arg("values"), py::arg("round") = "rn", py::arg("satfinite") = false);
    m.def("decode_tensormap", decode_map);
    m.def("tensormap_replace", replace_map);
    m.def("tma_box_bytes", [](const py::bytes& map) { return tma_box_bytes(map_of(map)); });
    m.def("tma_load", tma_load, py::arg("map"), py::arg("coords"), py::arg("shared"), py::arg("offset"), py::arg("gather4") = false);
    m.def("tma_store", tma_store, py::arg("map"), py::arg("coords"), py::arg("shared"), py::arg("offset"),
          py::arg("scatter4") = false, py::arg("reduce") = -1);
    m.def("tmem_ld", tmem_ld, py::arg("tmem"), py::arg("shape"), py::arg("num"), py::arg("pack16"), py::arg("taddr"), py::arg("split") = 0);
    m.def("tmem_st", tmem_st, py::arg("tmem"), py::arg("regs"), py::arg("shape"), py::arg("num"), py::arg("pack16"),
          py::arg("taddr"), py::arg("split") = 0);
    m.def("tmem_rects", tmem_rects);
    m.def("tmem_cp", tmem_cp);
    m.def("tmem_shift", tmem_shift);
    m.def("umma", umma);
    m.def("wgmma", wgmma);
    m.def("mma", mma);
    m.def("ldmatrix", ldmatrix);
    m.def("stmatrix", stmatrix);
    m.def("movmatrix", movmatrix);
}

}  // namespace warpcheck
