// Who touched each word last: what races.hpp compares an access with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace warpcheck {

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

// The different words there are, by number; 0 is one that nobody has touched. Memory holds numbers, because what one
// operation touches mostly looks alike. A number that nobody uses any more is given again after the operation at hand.
class Words {
public:
    static constexpr uint32_t kUntouched = 0;

    const Word& operator[](uint32_t number) const { return words_[number]; }
    // For a change that concerns all `count` users of the word; null where there are others.
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

// How many of `count` numbers from the first on are equal.
inline size_t alike(const uint32_t* numbers, size_t count) {
    if (std::memcmp(numbers, numbers + 1, (count - 1) * sizeof *numbers) == 0) return count;
    size_t n = 1;
    while (numbers[n] == numbers[0]) ++n;
    return n;
}

// The words of one memory, by number.
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
