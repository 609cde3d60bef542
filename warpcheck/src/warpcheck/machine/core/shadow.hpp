// Shadow memory: the last accesses of each word. races.hpp compares new accesses with them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace warpcheck {

enum AccessKind : uint8_t { kWrite = 1, kAsync = 2, kAtomic = 4, kCopy = 8 };     // kCopy: by cp.async

// All zeros means no access. There is no padding, so that equal cells compare equal as bytes.
struct Access {
    uint32_t slot = 0, epoch = 0;   // epoch 0: no access
    int32_t row = 0, cta = 0;
    int16_t warp = 0;
    uint16_t bytes = 0;             // accessed bytes of the cell, as a bit mask
    uint8_t kind = 0;
    int8_t lane = 0;                // -1: whole warp, or asynchronous operation
    uint16_t unused = 0;
};

// Last accesses of a few bytes. There are two writes, because the bytes of a word may have different writers.
template <int Readers>
struct Cell {
    static constexpr int readers = Readers;
    Access writes[2];
    Access reads[Readers];
};

// Shadow of a word of shared or tensor memory. Two warpgroups of four warps may read it at once; further readers
// overwrite each other.
using Word = Cell<8>;

// Pool of the distinct words, by number; number 0 is an untouched word. Memories store numbers, because most words that
// one operation touches are equal. An unused number is recycled after the current operation.
class Words {
public:
    static constexpr uint32_t kUntouched = 0;

    const Word& operator[](uint32_t number) const { return words_[number]; }
    // Word to be changed in place for all of its `count` users; null if it has other users.
    Word* only(uint32_t number, size_t count) { return number != kUntouched && uses_[number] == count ? &words_[number] : nullptr; }
    uint32_t add(const Word& word) {
        if (free_.empty()) {
            words_.push_back(word);
            uses_.push_back(0);
            return uint32_t(words_.size() - 1);
        }
        const uint32_t number = free_.back();
        free_.pop_back();
        words_[number] = word;
        uses_[number] = 0;
        return number;
    }
    void move(uint32_t from, uint32_t to, size_t count) {
        if (to != kUntouched) uses_[to] += uint32_t(count);
        drop(from, count);
    }
    void drop(uint32_t number, size_t count) {
        if (number == kUntouched) return;
        uses_[number] -= uint32_t(count);
        if (!uses_[number]) dropped_.push_back(number);
    }
    void collect() {
        for (const uint32_t number : dropped_)
            if (!uses_[number]) {
                uses_[number] = kFree;
                free_.push_back(number);
            }
        dropped_.clear();
    }

private:
    static constexpr uint32_t kFree = ~0u;
    std::vector<Word> words_{1};
    std::vector<uint32_t> uses_{0};
    std::vector<uint32_t> free_, dropped_;
};

// Length of the run of equal numbers at the start of `count` numbers.
inline size_t alike(const uint32_t* numbers, size_t count) {
    if (std::memcmp(numbers, numbers + 1, (count - 1) * sizeof *numbers) == 0) return count;
    size_t n = 1;
    while (numbers[n] == numbers[0]) ++n;
    return n;
}

// Shadow words of one memory, by number.
class Shadow {
public:
    Shadow() = default;
    Shadow(const Shadow&) = delete;
    Shadow& operator=(const Shadow&) = delete;
    ~Shadow() { forget(0, numbers_.size()); }

    bool empty() const { return numbers_.empty(); }
    size_t size() const { return numbers_.size(); }
    void resize(Words& words, size_t count) {
        words_ = &words;
        numbers_.resize(count, Words::kUntouched);
    }
    uint32_t* at(size_t i) { return numbers_.data() + i; }
    const uint32_t* at(size_t i) const { return numbers_.data() + i; }
    void forget(size_t first, size_t count) {
        for (size_t i = first, n; i < first + count; i += n) {
            n = alike(at(i), first + count - i);
            words_->drop(numbers_[i], n);
            std::fill_n(at(i), n, Words::kUntouched);
        }
    }

private:
    Words* words_ = nullptr;
    std::vector<uint32_t> numbers_;
};

}  // namespace warpcheck
