"""Every environment variable fa4 reads: name, default, meaning."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """Environment variable; `get` reads it at the time of the call."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name) or self.default


BACKGROUND = Variable(
    "FA4_BACKGROUND",
    "1",
    "0: a training call waits for its own kernel, even if a slower one could serve it while another process compiles",
)
CACHE = Variable("FA4_CACHE", "1", "0 turns the disk cache of compiled kernels off")
CACHE_DIR = Variable("FA4_CACHE_DIR", "", "directory of that cache; default ${XDG_CACHE_HOME:-~/.cache}/fa4")
CACHE_DAYS = Variable(
    "FA4_CACHE_DAYS", "30", "days after which a kernel that nobody loads leaves that cache; 0 keeps all"
)
CACHE_GB = Variable(
    "FA4_CACHE_GB", "4", "gigabytes that the cache may hold, the longest unused leave first; 0 is no limit"
)
CHECK_LENGTHS = Variable(
    "FA4_CHECK_LENGTHS",
    "0",
    "1 checks cu_seqlens, seqused and max_seqlen on accelerators too, where it stalls; read once",
)
RECORD = Variable("FA4_RECORD", "", "file to which problems are added as they first come, for `fa4 compile --record`")

VARIABLES = (BACKGROUND, CACHE, CACHE_DIR, CACHE_DAYS, CACHE_GB, CHECK_LENGTHS, RECORD)
