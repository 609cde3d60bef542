"""Calls that come again: each change of what a function reads is seen, and what is the same is not traced again."""

import array
import functools
import math
import random
import threading
import time

import numpy as np
import pytest
import torch

import fa4
from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import trace_mask
from tests.mods import read
from tests.mods.read.mask import by, traced_once


@pytest.mark.parametrize("name", read.cases())
def test_a_change_of_what_a_function_reads_is_seen(restored, name, seed):
    """By calls, which look at identity first, and by traces, which are found by value."""
    function, change = read.cases()[name]
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 12, 2, 8, generator=generator)

    def attend():
        return fa4.flash_attn_func(q, q, q, mask_mod=function)

    def expected(window):
        return fa4.flash_attn_func(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= window)

    assert torch.equal(attend(), expected(3)) and torch.equal(attend(), expected(3))
    change(5)
    assert torch.equal(attend(), expected(5)), f"{name} is stale, seed {seed}"


def test_a_function_that_changes_what_it_reads_is_traced_each_time(seed):
    count = [0]

    def counts(b, h, q_idx, kv_idx):
        count[0] += 1
        return q_idx - kv_idx <= count[0]

    q = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(seed))
    for window in (1, 2, 3):
        expected = fa4.flash_attn_func(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx, w=window: q_idx - kv_idx <= w)
        assert torch.equal(fa4.flash_attn_func(q, q, q, mask_mod=counts), expected), f"seed {seed}"


def test_an_emptied_variable_is_the_functions_own_error():
    window = 3

    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window  # noqa: F821

    q = torch.randn(1, 12, 2, 8)
    fa4.flash_attn_func(q, q, q, mask_mod=mask_mod)
    del window
    for _ in range(2):
        with pytest.raises(NameError, match="window"):
            fa4.flash_attn_func(q, q, q, mask_mod=mask_mod)


def test_what_is_the_same_is_not_traced_again(restored):
    """All but what a walk cannot follow."""
    again = {"cached_property", "decorated", "match", "getattr", "dict_of_module", "globals", "import"}
    again |= {"module_of_torch", "parameter", "format", "format_of_a_constant", "version", "gradient"}
    again |= {"getattr_by_another_name", "getattr_in_a_partial", "getattr_in_a_map", "attrgetter_by_another_name"}
    again |= {"asdict_by_another_name"}
    assert {name for name, (function, _) in read.cases().items() if not traced_once(function)} == again

    def by_torch(b, h, q_idx, kv_idx):
        return torch.where(q_idx > kv_idx, math.pi, torch.nn.functional.relu(q_idx)) > read.objects.Kind.NEAR

    assert traced_once(by_torch)


@pytest.mark.parametrize(
    "state",
    [random.Random(3), iter((3, 5)), torch.Generator(), np.zeros(3), array.array("i", [3]), threading.local()],
    ids=lambda state: type(state).__name__,
)
def test_what_has_a_state_in_c_is_traced_again(state):
    assert not traced_once(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= (3 if state is not None else 5))
    assert not traced_once(by(functools.partial(lambda x: 3, state)))


@pytest.mark.parametrize(
    "state",
    [torch.get_default_dtype, torch.initial_seed, torch.get_num_threads, torch.is_grad_enabled,
     torch.cuda.is_available, torch.distributed.is_initialized],
    ids=lambda state: state.__name__,
)  # fmt: skip
def test_a_state_of_the_process_is_read_again(state):
    """By whatever name."""
    assert not traced_once(by(lambda: 3 if state() else 5))
    assert not traced_once(by(functools.partial(lambda ask: 3 if ask() else 5, state)))


def test_a_flag_of_a_backend_is_read_again():
    assert not traced_once(by(lambda: 3 if torch.backends.cudnn.benchmark else 5))


def test_tensors_of_other_strides_and_devices_have_other_traces():
    def by_stride(x):
        return by(lambda: 3 if x.is_contiguous() else 5)

    def by_device(x):
        return by(lambda: 3 if x.device.type == "cpu" else 5)

    x = torch.zeros(2, 2)
    for make, other in ((by_stride, x.T), (by_device, x.to("meta"))):
        assert cached_trace(trace_mask, make(x)).numbers == (3,)
        assert cached_trace(trace_mask, make(other)).numbers == (5,)


def test_a_clock_is_read_again():
    start = time.monotonic()
    assert not traced_once(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= int(time.monotonic() - start))
