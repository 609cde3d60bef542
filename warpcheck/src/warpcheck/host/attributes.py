"""Device attributes and occupancy of an emulated chip."""

from __future__ import annotations

from cuda.bindings import driver

from warpcheck.machine.chips import RESERVED_SHARED, ChipFacts

_KIB = 1024
LARGEST_CLUSTER = 16  # blocks, of a kernel that allows sizes that are not portable


def resident_blocks(facts: ChipFacts, threads: int, smem_bytes: int) -> int:
    """Return the blocks that a multiprocessor runs at once, by threads and dynamic shared memory.

    Registers do not count: the assembler decides about them.
    """
    if smem_bytes > facts.smem_per_block:
        return 0
    whole_warps = max(32, (threads + 31) // 32 * 32)
    by_smem = facts.smem_per_sm // (smem_bytes + RESERVED_SHARED)
    return min(facts.blocks_per_sm, facts.threads_per_sm // whole_warps, by_smem)


def resident_clusters(sms: int, cluster: int, blocks: int) -> int:
    """Return the clusters that run at once. blocks: per multiprocessor.

    Each block of a cluster has its own multiprocessor, and any multiprocessors of the chip may form a cluster.
    """
    return 0 if cluster > min(sms, LARGEST_CLUSTER) else sms // cluster * blocks


def device_attribute(facts: ChipFacts, sms: int, attribute: int) -> int:
    """Return the value of a CUdevice_attribute (cudaDevAttr of the runtime has the same numbers).

    Raises:
        NotImplementedError: the attribute is not modelled.
    """
    kind = driver.CUdevice_attribute(attribute)
    name = kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    values = {
        "COMPUTE_CAPABILITY_MAJOR": facts.capability[0],
        "COMPUTE_CAPABILITY_MINOR": facts.capability[1],
        "MULTIPROCESSOR_COUNT": sms,
        "WARP_SIZE": 32,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_THREADS_PER_MULTIPROCESSOR": facts.threads_per_sm,
        "MAX_BLOCKS_PER_MULTIPROCESSOR": facts.blocks_per_sm,
        "MAX_BLOCK_DIM_X": 1024,
        "MAX_BLOCK_DIM_Y": 1024,
        "MAX_BLOCK_DIM_Z": 64,
        "MAX_GRID_DIM_X": 2**31 - 1,
        "MAX_GRID_DIM_Y": 65535,
        "MAX_GRID_DIM_Z": 65535,
        "MAX_REGISTERS_PER_BLOCK": facts.registers_per_sm,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": facts.registers_per_sm,
        "MAX_SHARED_MEMORY_PER_BLOCK": 48 * _KIB,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": facts.smem_per_block,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": facts.smem_per_sm,
        "RESERVED_SHARED_MEMORY_PER_BLOCK": RESERVED_SHARED,
        "TOTAL_CONSTANT_MEMORY": 64 * _KIB,
        "L2_CACHE_SIZE": facts.l2,
        "MAX_PERSISTING_L2_CACHE_SIZE": facts.l2 // 2,
        "CLOCK_RATE": 1_700_000,
        "MEMORY_CLOCK_RATE": 2_600_000,
        "GLOBAL_MEMORY_BUS_WIDTH": 5120,
        "COOPERATIVE_LAUNCH": 1,
        "CLUSTER_LAUNCH": int(facts.capability >= (9, 0)),
        "TENSOR_MAP_ACCESS_SUPPORTED": int(facts.capability >= (9, 0)),
        "MEMORY_POOLS_SUPPORTED": 1,
        "UNIFIED_ADDRESSING": 1,
        "MANAGED_MEMORY": 1,
        "CONCURRENT_KERNELS": 1,
        "MULTICAST_SUPPORTED": 0,
    }
    if name not in values:
        raise NotImplementedError(f"device attribute {kind.name} is not modelled by the emulated {facts.target}")
    return values[name]
