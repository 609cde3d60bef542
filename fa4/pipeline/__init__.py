"""Parts of warp-specialised kernels for sm_90 and newer: roles, channels between roles, shared memory, TMA.

A kernel is a few tables (`RoleTable`, `ChannelTable`, `SmemMap`) and one function per role. The tables allocate, derive
arrival counts, raise errors for misuse while the kernel is traced, and print themselves (`picture`). Nothing here
imports a chip: chip-specific barrier operations are passed in as `Signals`.
"""
