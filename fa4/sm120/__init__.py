"""Consumer Blackwell (sm_120, sm_121) kernels: mma.sync, also with scales of blocks, and TMA, warp-specialised."""
