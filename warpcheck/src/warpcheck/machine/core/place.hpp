// Location of an access or a finding.
#pragma once

#include <cstdint>

namespace warpcheck {

// Fields that are unknown are -1 or 0.
struct Place {
    int32_t row = -1;       // instruction row
    int32_t cta = -1;       // linear index in the grid
    int32_t warp = -1;
    uint32_t lanes = 0;
};

}  // namespace warpcheck
