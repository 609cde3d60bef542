// Where something happened, and an error with such places.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fa4 {

// Who and where, as far as known.
struct Place {
    int32_t row = -1;       // instruction row
    int32_t cta = -1;       // linear index in the grid
    int32_t warp = -1;
    uint32_t lanes = 0;
};

// What a kernel did wrong; `kind` is the name of the Python class.
struct SimError : std::runtime_error {
    std::string kind;
    Place place;
    std::vector<std::pair<std::string, Place>> others;
    SimError(std::string k, const std::string& message) : std::runtime_error(message), kind(std::move(k)) {}
};

}  // namespace fa4
