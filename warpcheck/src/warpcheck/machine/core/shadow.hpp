// Shadow memory: the last accesses of each word. races.hpp compares new accesses with them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace warpcheck {

enum AccessKind : uint8_t { kWrite = 1, kAsync = 2, kAtomic = 4, kCopy = 8 };     // kCopy: by cp.async

// All zeros means no access. There is no padding, so that equal cells compare equal as bytes. The CTA follows from slot
// and epoch (`Races::cta_of`): four accesses fill a cache line, and the shadow is what the emulator waits for most.
struct Access {
    uint32_t slot = 0, epoch = 0;   // epoch 0: no access
    int32_t row : 21;
    uint32_t kind : 4;
    int32_t lane : 7;               // -1: whole warp, or asynchronous operation
    uint16_t bytes = 0;             // accessed bytes of the cell, as a bit mask
    int16_t warp = 0;

    Access() : row(0), kind(0), lane(0) {}
    Access(uint32_t slot, uint32_t epoch, int32_t row, int16_t warp, uint16_t bytes, uint8_t kind, int8_t lane)
        : slot(slot), epoch(epoch), row(row), kind(kind), lane(lane), bytes(bytes), warp(warp) {}
};
static_assert(sizeof(Access) == 16);
constexpr size_t kRows = size_t(1) << 20;   // of a program

// Last accesses of a few bytes of global memory. There are two writes, because the bytes may have different writers.
struct alignas(64) Cell {
    static constexpr uint32_t readers = 2;
    static constexpr bool counts = false;
    Access writes[2];
    Access reads[readers];

    uint32_t reads_used() const { return readers; }
    Access& read(uint32_t i) { return reads[i]; }
};

// Shadow of a word of shared or tensor memory: a cache line with what most accesses need.
struct alignas(64) Word {
    uint32_t used = 0, unused[3] = {};      // used: number of reads up to the last one that is there
    Access writes[2];
    Access first;
};
static_assert(sizeof(Word) == 64);

// Two warpgroups of four warps may read a word at once; further readers overwrite each other.
constexpr uint32_t kReaders = 8;
// The reads of a word but the first. Those from `Word::used` on have no meaning.
struct MoreReads { Access at[kReaders - 1]; };

// A word with its reads, where they are.
struct WordRef {
    static constexpr uint32_t readers = kReaders;
    static constexpr bool counts = true;
    uint32_t& used;
    Access (&writes)[2];
    Access &first, *more;

    WordRef(Word& word, MoreReads& reads) : used(word.used), writes(word.writes), first(word.first), more(reads.at) {}
    uint32_t reads_used() const { return used; }
    Access& read(uint32_t i) { return i ? more[i - 1] : first; }
};

// A copy of a word with its reads.
struct WholeWord {
    Word word;
    MoreReads more;

    WordRef ref() { return {word, more}; }
};

// Pool of the distinct words, by number; number 0 is an untouched word. Memories store numbers, because most words that
// one operation touches are equal. An unused number is recycled after the current operation.
class Words {
public:
    static constexpr uint32_t kUntouched = 0;

    WordRef operator[](uint32_t number) { return {words_[number], more_[number]}; }
    void copy(uint32_t number, WholeWord& to) const {
        to.word = words_[number];
        std::copy_n(more_[number].at, more_reads(to.word), to.more.at);
    }
    bool equal(uint32_t number, const WholeWord& whole) const {
        return std::memcmp(&words_[number], &whole.word, sizeof(Word)) == 0 &&
               std::memcmp(more_[number].at, whole.more.at, more_reads(whole.word) * sizeof(Access)) == 0;
    }
    void prefetch(uint32_t number) const { __builtin_prefetch(&words_[number]); }
    // True if a word may be changed in place for all of its `count` users: it has no others.
    bool only(uint32_t number, size_t count) const { return number != kUntouched && uses_[number] == count; }
    void set(uint32_t number, const WholeWord& whole) {
        words_[number] = whole.word;
        std::copy_n(whole.more.at, more_reads(whole.word), more_[number].at);
    }
    uint32_t add(const WholeWord& whole) {
        uint32_t number = uint32_t(words_.size());
        if (free_.empty()) {
            words_.emplace_back();
            more_.emplace_back();
            uses_.push_back(0);
        } else {
            number = free_.back();
            free_.pop_back();
            uses_[number] = 0;
        }
        set(number, whole);
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
    static uint32_t more_reads(const Word& word) { return word.used ? word.used - 1 : 0; }
    std::vector<Word> words_{1};
    std::vector<MoreReads> more_{1};
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
