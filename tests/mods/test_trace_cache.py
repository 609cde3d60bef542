"""Calls that come again: each change of what a function reads is seen, and what is kept does not grow."""

import array
import collections
import dataclasses
import enum
import functools
import gc
import math
import operator
import random
import sys
import threading
import time
import tracemalloc
import types
import weakref

import numpy as np
import pytest
import torch

import fa4
from fa4.mods.frontend import trace_cache
from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import trace_mask, trace_score

cfg = types.ModuleType("cfg")
cfg.mask = types.ModuleType("cfg.mask")
WINDOW, LIST, DICT = 3, [3], {"window": 3}


class Class:
    window = 3
    settings = {"window": 3}  # noqa: RUF012

    @staticmethod
    def of_static():
        return WINDOW

    @classmethod
    def of_class(cls):
        return cls.window


class Derived(Class):
    pass


@dataclasses.dataclass
class Config:
    window: int = 3
    names: tuple = ()

    @property
    def doubled(self):
        return 2 * self.window

    @functools.cached_property
    def cached(self):
        return WINDOW

    def method(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= self.window

    def __getitem__(self, key):
        return self.window if key else 0

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= self.window


class Answer:
    def __call__(self, key):
        return WINDOW


class ByObject:
    """A special method is an object that is called."""

    __getitem__ = Answer()


class Moved(Class):
    """Gets another base."""


class Bare:
    """Gets a method that Python calls."""

    window = 3


@dataclasses.dataclass(eq=False)
class Told:
    """No method but that of a text names the attribute."""

    window: int = 3


class Slots:
    __slots__ = ("window",)

    def __init__(self, window):
        self.window = window


class Missing:
    def __getattr__(self, name):
        return WINDOW


class Made:
    """An instance is made by the function."""

    def __init__(self):
        self.window = WINDOW


class Kind(enum.IntEnum):
    NEAR = 3


class Mode(enum.Enum):
    NEAR = 1
    FAR = 2

    def window(self):
        return WINDOW

    @property
    def width(self):
        return WINDOW

    @classmethod
    def _missing_(cls, value):
        return cls.NEAR if WINDOW == 3 else cls.FAR


class Flags(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.window = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.factor = 3

    def forward(self, distance):
        return distance <= self.factor

    def mask_mod(self, b, h, q_idx, kv_idx):
        return self(q_idx - kv_idx)


def helper():
    return WINDOW


def default(window=WINDOW):
    return window


def settings(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= settings.window


fetch, fetcher, text, as_dict = getattr, operator.attrgetter, repr, dataclasses.asdict


def set_global(name):
    def change(value):
        globals()[name] = value

    return change


def by(read):
    """A mask of a window that `read` gives."""
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= read()


def cases():
    """(function, change): change(5) makes what the function reads a 5."""
    config, told, slots, space = Config(), Told(), Slots(3), types.SimpleNamespace(window=3)
    nested = types.SimpleNamespace(inner=[{"config": Config()}])
    table = [torch.tensor([3.0]), torch.tensor([5.0])]
    marked = torch.zeros(2)
    marked.window = 3
    layer, partial = Layer(), functools.partial(lambda w, b, h, q_idx, kv_idx: q_idx - kv_idx <= w["w"], {"w": 3})
    keywords = functools.partial(lambda b, h, q_idx, kv_idx, window: q_idx - kv_idx <= window, window=3)
    Point = collections.namedtuple("Point", "window")
    cell = 3
    point = Point(3)
    sequence, ordered, module = collections.deque([3]), collections.OrderedDict(), types.ModuleType("module")
    partial.window = ordered.window = module.window = 3
    square = torch.zeros(2, 2)
    narrow = torch.zeros(20).as_strided((2, 3), (3, 1))

    def of_cell(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= cell

    def of_point(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= point.window

    def set_cell(value):
        nonlocal cell
        cell = value

    def set_point(value):
        nonlocal point
        point = Point(value)

    def with_keyword(b, h, q_idx, kv_idx, *, window=3):
        return q_idx - kv_idx <= window

    def with_default(b, h, q_idx, kv_idx, window=3):
        return q_idx - kv_idx <= window

    def with_code(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 3

    def other_code(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 5

    def with_nested(b, h, q_idx, kv_idx):
        return (lambda: q_idx - kv_idx <= WINDOW)()

    def by_import(b, h, q_idx, kv_idx):
        from fa4_test_config import window

        return q_idx - kv_idx <= window

    def by_match(b, h, q_idx, kv_idx):
        match config:
            case Config(window=window):
                return q_idx - kv_idx <= window

    def of_torch(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= torch.fa4_window

    def set_base(value):
        Moved.__bases__ = (type("Base", (), {"window": value}),)

    def set_init(value):
        Bare.__init__ = lambda self: setattr(self, "window", value)

    def of_text(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= int(f"{config!r}"[14])

    @torch.no_grad()
    def decorated():
        return WINDOW

    def set_default(value):
        with_default.__defaults__ = (value,)

    return {
        "cell": (of_cell, set_cell),
        "global": (by(lambda: WINDOW), set_global("WINDOW")),
        "function_within": (with_nested, set_global("WINDOW")),
        "helper": (by(helper), set_global("WINDOW")),
        "decorated": (by(decorated), set_global("WINDOW")),
        "list": (by(lambda: LIST[0]), functools.partial(LIST.__setitem__, 0)),
        "deque": (by(lambda: sequence[0]), functools.partial(sequence.__setitem__, 0)),
        "dict": (by(lambda: DICT["window"]), functools.partial(DICT.__setitem__, "window")),
        "module": (by(lambda: cfg.window), functools.partial(setattr, cfg, "window")),
        "chain": (by(lambda: cfg.mask.window), functools.partial(setattr, cfg.mask, "window")),
        "torchs_attribute": (of_torch, functools.partial(setattr, torch, "fa4_window")),
        "class": (by(lambda: Class.window), functools.partial(setattr, Class, "window")),
        "dict_of_class": (
            by(lambda: Class.settings["window"]),
            functools.partial(Class.settings.__setitem__, "window"),
        ),
        "base_class": (by(lambda: Derived.window), functools.partial(setattr, Class, "window")),
        "class_over_base": (by(lambda: Derived().window), functools.partial(setattr, Derived, "window")),
        "static_method": (by(lambda: Class.of_static()), set_global("WINDOW")),
        "class_method": (by(lambda: Derived.of_class()), functools.partial(setattr, Derived, "window")),
        "function_attribute": (settings, functools.partial(setattr, settings, "window")),
        "instance": (by(lambda: config.window), functools.partial(setattr, config, "window")),
        "property": (by(lambda: config.doubled // 2), functools.partial(setattr, config, "window")),
        "cached_property": (by(lambda: config.cached), functools.partial(config.__dict__.__setitem__, "cached")),
        "getitem": (by(lambda: config[1]), functools.partial(setattr, config, "window")),
        "match": (by_match, functools.partial(setattr, config, "window")),
        "text": (of_text, functools.partial(setattr, config, "window")),
        "text_by_another_name": (by(lambda: int(text(told)[12])), functools.partial(setattr, told, "window")),
        "text_by_percent": (by(lambda: int(("%r" % told)[12])), functools.partial(setattr, told, "window")),  # noqa: UP031
        "format": (
            by(lambda: int("{0.window}".format(module))),  # noqa: UP030, UP032
            functools.partial(setattr, module, "window"),
        ),
        "format_of_a_constant": (
            (lambda form: by(lambda: int(form(module))))("{0.window}".format),
            functools.partial(setattr, module, "window"),
        ),
        "getattr_by_another_name": (by(lambda: fetch(cfg, "window")), functools.partial(setattr, cfg, "window")),
        "getattr_in_a_partial": (
            by(functools.partial(getattr, cfg, "window")),
            functools.partial(setattr, cfg, "window"),
        ),
        "getattr_in_a_map": (
            by(lambda: next(map(fetch, [cfg], ["window"]))),
            functools.partial(setattr, cfg, "window"),
        ),
        "attrgetter_by_another_name": (by(lambda: fetcher("window")(cfg)), functools.partial(setattr, cfg, "window")),
        "asdict_by_another_name": (
            by(lambda: as_dict(told)["window"]),
            functools.partial(setattr, told, "window"),
        ),
        "attribute_of_a_partial": (by(lambda: partial.window), functools.partial(setattr, partial, "window")),
        "attribute_of_an_ordered_dict": (by(lambda: ordered.window), functools.partial(setattr, ordered, "window")),
        "attributes_of_a_function": (
            by(lambda: helper.window),
            lambda value: setattr(helper, "__dict__", {"window": value}),
        ),
        "method_of_an_enum": (by(lambda: Mode.NEAR.window()), set_global("WINDOW")),
        "property_of_an_enum": (by(lambda: Mode.NEAR.width), set_global("WINDOW")),
        "member_that_is_missing": (by(lambda: 3 if Mode(0) is Mode.NEAR else 5), set_global("WINDOW")),
        "attribute_of_a_member": (by(lambda: Mode.NEAR.own), functools.partial(setattr, Mode.NEAR, "own")),
        "attribute_of_an_enum": (by(lambda: Mode.later), functools.partial(setattr, Mode, "later")),
        "attribute_of_flags": (
            by(lambda: (Flags.LEFT | Flags.RIGHT).window),
            lambda value: setattr(Flags.LEFT | Flags.RIGHT, "window", value),
        ),
        "special_method_that_is_an_object": (by(lambda: ByObject()[0]), set_global("WINDOW")),
        "special_method_that_is_new": (by(lambda: Bare().window), set_init),
        "base_that_is_another": (by(lambda: Moved.window), set_base),
        "stride": (by(lambda: narrow.stride(0)), lambda value: narrow.as_strided_((2, 3), (value, 1))),
        "version": (by(lambda: 3 if square._version == 0 else 5), lambda value: square.zero_()),
        "gradient": (by(lambda: 3 if square.grad is None else 5), lambda value: setattr(square, "grad", square + 1)),
        "slots": (by(lambda: slots.window), functools.partial(setattr, slots, "window")),
        "getattr_of_instance": (by(lambda: Missing().anything), set_global("WINDOW")),
        "made_within": (by(lambda: Made().window), set_global("WINDOW")),
        "namespace": (by(lambda: space.window), functools.partial(setattr, space, "window")),
        "nested": (
            by(lambda: nested.inner[0]["config"].window),
            functools.partial(setattr, nested.inner[0]["config"], "window"),
        ),
        "named_tuple": (of_point, set_point),
        "getattr": (by(lambda: getattr(cfg, "".join(("win", "dow")))), functools.partial(setattr, cfg, "window")),
        "dict_of_module": (by(lambda: cfg.__dict__["window"]), functools.partial(setattr, cfg, "window")),
        "globals": (by(lambda: globals()["WINDOW"]), set_global("WINDOW")),
        "import": (by_import, functools.partial(setattr, cfg, "window")),
        "default": (with_default, set_default),
        "keyword_default": (with_keyword, functools.partial(with_keyword.__kwdefaults__.__setitem__, "window")),
        "code": (with_code, lambda value: setattr(with_code, "__code__", other_code.__code__)),
        "bound_method": (config.method, functools.partial(setattr, config, "window")),
        "callable_object": (config, functools.partial(setattr, config, "window")),
        "partial": (partial, functools.partial(partial.args[0].__setitem__, "w")),
        "keyword_of_partial": (keywords, functools.partial(keywords.keywords.__setitem__, "window")),
        "module_of_torch": (layer.mask_mod, functools.partial(setattr, layer, "factor")),
        "parameter": (by(lambda: layer.window), lambda value: layer.window.fill_(value)),
        "tensor_in_list": (by(lambda: table[0][0]), lambda value: table.reverse()),
        "attribute_of_a_tensor": (by(lambda: marked.window + marked[0]), functools.partial(setattr, marked, "window")),
        "bound_method_in_c": (
            (lambda get: lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= get("window"))(DICT.get),
            functools.partial(DICT.__setitem__, "window"),
        ),
    }


NAMES = list(cases())


@pytest.fixture
def restored(monkeypatch):
    """What cases change is put back."""
    global WINDOW
    monkeypatch.setitem(sys.modules, "fa4_test_config", cfg)
    setting = [(cfg, "window"), (cfg.mask, "window"), (torch, "fa4_window"), (settings, "window"), (Class, "window")]
    setting += [(helper, "window"), (Mode.NEAR, "own"), (Mode, "later"), (Flags.LEFT | Flags.RIGHT, "window")]
    for x, name in setting:
        setattr(x, name, 3)
    yield
    Moved.__bases__ = (Class,)
    if "__init__" in vars(Bare):
        del Bare.__init__
    WINDOW, LIST[0], DICT["window"], Class.settings["window"] = 3, 3, 3, 3
    del torch.fa4_window
    if "window" in vars(Derived):
        del Derived.window


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_what_a_function_reads_is_seen(restored, name, seed):
    """By calls, which look at identity first, and by traces, which are found by value."""
    function, change = cases()[name]
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


@pytest.mark.parametrize(
    "first, second", [(0.0, -0.0), (np.float32(0), np.float32(-0.0)), (0, False), (1, 1.0), (1, True)]
)
def test_numbers_that_are_equal_but_not_the_same(first, second):
    def make(x):
        kind = lambda: 2 if isinstance(x, bool) else 3 if isinstance(x, int) else 4  # noqa: E731
        return lambda score, b, h, q_idx, kv_idx: score + math.copysign(1.0, x) * q_idx + kind() * kv_idx

    one, other = (cached_trace(trace_score, make(x)) for x in (first, second))
    assert one == trace_score(make(first)) and other == trace_score(make(second)) and one != other


def test_long_doubles_are_numbers_like_others():
    def make(x):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= int(x)

    assert traced_once(make(np.longdouble(3)))
    numbers = [cached_trace(trace_mask, make(np.longdouble(x))).numbers for x in (3, 5)]
    assert numbers == [trace_mask(make(x)).numbers for x in (3, 5)]


def test_a_nan_is_the_same_as_another(monkeypatch):
    """A trace for each would fill the table."""
    traces = []

    def trace(function):
        traces.append(function)
        return trace_score(function)

    for _ in range(3):
        x = float("nan") * 1.0
        cached_trace(trace, lambda score, b, h, q_idx, kv_idx, x=x: torch.where(q_idx > 3, score, x))
    assert len(traces) == 1


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


def test_functions_that_lead_to_themselves_and_deep_ones():
    """As in recursion; and nested deeper than Python's stack."""

    def power(x, n):
        return x if n == 0 else power(x, n - 1) * 0.5

    deep = 2.0
    for _ in range(5000):
        deep = [deep]
    q = torch.randn(1, 12, 2, 8)
    for _ in range(2):
        fa4.flash_attn_func(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: power(score, 3))
        fa4.flash_attn_func(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: score * len(deep))


def traced_once(function):
    traces = []

    def trace(x):
        traces.append(x)
        return trace_mask(x)

    for _ in range(2):
        cached_trace(trace, function)
    return len(traces) == 1


def test_what_is_the_same_is_not_traced_again(restored):
    """All but what a walk cannot follow."""
    again = {"cached_property", "decorated", "match", "getattr", "dict_of_module", "globals", "import"}
    again |= {"module_of_torch", "parameter", "format", "format_of_a_constant", "version", "gradient"}
    again |= {"getattr_by_another_name", "getattr_in_a_partial", "getattr_in_a_map", "attrgetter_by_another_name"}
    again |= {"asdict_by_another_name"}
    assert {name for name, (function, _) in cases().items() if not traced_once(function)} == again

    def by_torch(b, h, q_idx, kv_idx):
        return torch.where(q_idx > kv_idx, math.pi, torch.nn.functional.relu(q_idx)) > Kind.NEAR

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


@pytest.mark.parametrize(
    "name", ["global", "helper", "base_class", "static_method", "cell", "partial", "enum", "table", "wrapped", "ready"]
)
def test_a_usual_function_is_known_by_identity(restored, name):
    table = torch.tensor([3, 5])
    functions = {name: function for name, (function, _) in cases().items()} | {
        "enum": by(lambda: Kind.NEAR),
        "table": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= table[h],
        "wrapped": functools.wraps(settings)(by(lambda: WINDOW)),
        "ready": fa4.masks.sliding_window(3),
    }
    del functions["wrapped"].window
    q = torch.randn(1, 4, 2, 8)
    fa4.flash_attn_func(q, q, q, mask_mod=functions[name])
    assert trace_cache.known(None, functions[name], None) is not None


def test_a_clock_is_read_again():
    start = time.monotonic()
    assert not traced_once(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= int(time.monotonic() - start))


OF_EXEC = compile("def score_mod(score, b, h, q_idx, kv_idx): return score * factor", "of_exec", "exec")


def of_exec(factor):
    space = {"factor": factor, "__name__": __name__}
    exec(OF_EXEC, space)
    return space["score_mod"]


def test_what_is_kept_does_not_grow():
    """A captured number that is another one in each call, a function that refers to itself, and functions of exec."""
    q, factor = torch.randn(1, 4, 1, 8), 0.5

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor

    def itself(score, b, h, q_idx, kv_idx):
        return score * factor if itself else score

    def calls(count):
        nonlocal factor
        for _ in range(count):
            factor += 0.01
            for function in (score_mod, itself, of_exec(factor)):
                fa4.flash_attn_func(q, q, q, score_mod=function)

    def keeps(count):
        """What a call leaves, without tracing."""
        nonlocal factor
        for _ in range(count):
            factor += 0.01
            for function in (score_mod, itself, of_exec(factor)):
                trace_cache.keep(function, None, None, [function], None)

    calls(600)  # more than the table of traces holds
    gc.collect()
    kept, registry = len(trace_cache._cached_mods), len(weakref.finalize._registry)
    for work in (functools.partial(calls, 40), functools.partial(keeps, 20_000)):
        gc.collect()
        tracemalloc.start()
        work()
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 400_000, grown
    assert len(trace_cache._cached_mods) == kept and len(weakref.finalize._registry) == registry


def test_kept_functions_are_gone_with_their_last_reference():
    q = torch.randn(1, 4, 1, 8)
    gc.collect()
    kept = len(trace_cache._cached_mods)
    for _ in range(5):
        holder = Config()
        holder.mask_mod = lambda b, h, q_idx, kv_idx, of=holder: q_idx - kv_idx <= of.window
        table = torch.tensor([3, 5])
        executed, owner = of_exec(0.5), Config()
        owner.tensor = torch.tensor(3)
        owner.mask_mod = lambda b, h, q_idx, kv_idx, t=owner.tensor: q_idx - kv_idx <= t
        owner.tensor.owner = owner
        gone = [weakref.ref(x) for x in (table, holder, executed, owner)]
        mask_mod = fa4.masks.both(holder.mask_mod, lambda b, h, q_idx, kv_idx, t=table: kv_idx <= t[h])
        for _ in range(2):
            fa4.flash_attn_func(q, q, q, mask_mod=mask_mod)
            fa4.flash_attn_func(q, q, q, mask_mod=holder.mask_mod)
            fa4.flash_attn_func(q, q, q, mask_mod=owner.mask_mod)
            fa4.flash_attn_func(q, q, q, score_mod=executed)
        del holder, table, mask_mod, executed, owner
        gc.collect()
        assert not any(x() for x in gone)
    assert len(trace_cache._cached_mods) == kept


def test_threads_with_functions_of_their_own(restored, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 12, 2, 8, generator=generator)
    expected = [fa4.flash_attn_func(q, q, q, mask_mod=fa4.masks.sliding_window(w)) for w in range(1, 5)]
    wrong = []

    def work(window):
        for _ in range(20):

            def mask_mod(b, h, q_idx, kv_idx):
                return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

            if not torch.equal(fa4.flash_attn_func(q, q, q, mask_mod=mask_mod), expected[window - 1]):
                wrong.append(window)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"seed {seed}"
