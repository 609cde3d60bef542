// Who touched each word last: what races.hpp compares an access with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace fa4 {

enum AccessKind : uint8_t { kWrite = 1, kAsync = 2, kAtomic = 4, kCopy = 8 };     // kCopy: by cp.async

// All zeros is no access. No byte of it is padding, so that equal cells compare equal as bytes.
struct Access {
    uint32_t slot = 0, epoch = 0;   // epoch 0: none
    int32_t row = 0, cta = 0;
    int16_t warp = 0;
    uint16_t bytes = 0;             // which bytes of the cell
    uint8_t kind = 0;
    int8_t lane = 0;                // -1: the whole warp, or an asynchronous operation
    uint16_t unused = 0;
};

// The last accesses of a few bytes. Two writes, because a word's neighbours may come from somebody else.
template <int Readers>
struct Cell {
    static constexpr int readers = Readers;
    Access writes[2];
    Access reads[Readers];
};

// A word of shared or tensor memory. Two warpgroups of four warps may read it at once; of more readers, some are lost.
using Word = Cell<8>;

// Words, in lines of eight. What fills a line at once is kept in its first cell alone, for all eight; an
// access to a part of the line spreads it. Memory that nobody has touched costs none here: the system gives pages of
// zeros when they are first written.
class Shadow {
public:
    static constexpr size_t kLine = 8;
    enum class Line : uint8_t { Untouched, Even, Spread };

    bool empty() const { return !count_; }
    size_t size() const { return count_; }
    void resize(size_t cells) {
        count_ = (cells + kLine - 1) / kLine * kLine;
        cells_ = zeros<Word>(count_);
        lines_ = zeros<Line>(count_ / kLine);
    }
    Line line(size_t i) const { return lines_.get()[i / kLine]; }
    // A cell of its own.
    Word& cell(size_t i) {
        spread(i);
        return cells_.get()[i];
    }
    // The first cell of the line that begins at `i`: of an even line, the only one that is meant.
    Word& first(size_t i) {
        Line& line = lines_.get()[i / kLine];
        if (line == Line::Untouched) line = Line::Even;
        return cells_.get()[i];
    }
    const Word& at(size_t i) const { return cells_.get()[line(i) == Line::Even ? i / kLine * kLine : i]; }
    void spread(size_t i) {
        Line& line = lines_.get()[i / kLine];
        if (line == Line::Spread) return;
        Word* cells = cells_.get() + i / kLine * kLine;
        if (line == Line::Even) std::fill(cells + 1, cells + kLine, cells[0]);
        line = Line::Spread;
    }
    // Makes a line even again if its cells are equal.
    void join(size_t i) {
        const Word* cells = cells_.get() + i / kLine * kLine;
        for (size_t k = kLine - 1; k; --k)
            if (std::memcmp(cells, cells + k, sizeof *cells) != 0) return;
        lines_.get()[i / kLine] = Line::Even;
    }
    void forget(size_t first, size_t cells) {
        for (size_t i = first; i < first + cells;) {
            if (i % kLine == 0 && i + kLine <= first + cells) {
                if (line(i) != Line::Untouched) cells_.get()[i] = {}, lines_.get()[i / kLine] = Line::Even;
                i += kLine;
            } else {
                cell(i++) = {};
            }
        }
    }

private:
    struct Free { void operator()(void* p) const { std::free(p); } };
    template <class T>
    static std::unique_ptr<T, Free> zeros(size_t count) {
        std::unique_ptr<T, Free> all(static_cast<T*>(std::calloc(count, sizeof(T))));
        if (!all) throw std::bad_alloc();
        return all;
    }

    std::unique_ptr<Word, Free> cells_;
    std::unique_ptr<Line, Free> lines_;
    size_t count_ = 0;
};

}  // namespace fa4
