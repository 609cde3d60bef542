// Where something happened.
#pragma once

#include <cstdint>

namespace warpcheck {

// Who and where, as far as known.
struct Place {
    int32_t row = -1;       // instruction row
    int32_t cta = -1;       // linear index in the grid
    int32_t warp = -1;
    uint32_t lanes = 0;
};

}  // namespace warpcheck
