"""The vocabulary of warp-specialised kernels, sm_90 and newer: roles, channels between them, shared memory, TMA.

A kernel is a few tables (`RoleTable`, `ChannelTable`, `SmemMap`) and a function for each role. The tables allocate,
derive arrival counts, refuse misuse while the kernel is traced, and print themselves (`picture`). Nothing here imports
a chip: what only a chip knows about barriers comes as its `Signals`.
"""
