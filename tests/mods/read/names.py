"""Variables, containers and modules, and the ways to read them without their name."""

import collections
import functools
import operator
import types

import torch

from tests.mods.read.mask import by
from tests.mods.read.objects import Config

cfg = types.ModuleType("cfg")
cfg.mask = types.ModuleType("cfg.mask")
WINDOW, LIST, DICT = 3, [3], {"window": 3}
fetch, fetcher = getattr, operator.attrgetter


def helper():
    return WINDOW


def set_global(name):
    def change(value):
        globals()[name] = value

    return change


def prepare():
    for x, name in ((cfg, "window"), (cfg.mask, "window"), (torch, "fa4_window")):
        setattr(x, name, 3)


def restore():
    global WINDOW
    WINDOW, LIST[0], DICT["window"] = 3, 3, 3
    del torch.fa4_window


def cases():
    space = types.SimpleNamespace(window=3)
    nested = types.SimpleNamespace(inner=[{"config": Config()}])
    Point = collections.namedtuple("Point", "window")
    cell = 3
    point = Point(3)
    sequence, ordered, module = collections.deque([3]), collections.OrderedDict(), types.ModuleType("module")
    ordered.window = module.window = 3

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

    def with_nested(b, h, q_idx, kv_idx):
        return (lambda: q_idx - kv_idx <= WINDOW)()

    def by_import(b, h, q_idx, kv_idx):
        from fa4_test_config import window

        return q_idx - kv_idx <= window

    def of_torch(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= torch.fa4_window

    @torch.no_grad()
    def decorated():
        return WINDOW

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
        "namespace": (by(lambda: space.window), functools.partial(setattr, space, "window")),
        "nested": (
            by(lambda: nested.inner[0]["config"].window),
            functools.partial(setattr, nested.inner[0]["config"], "window"),
        ),
        "named_tuple": (of_point, set_point),
        "import": (by_import, functools.partial(setattr, cfg, "window")),
        "globals": (by(lambda: globals()["WINDOW"]), set_global("WINDOW")),
        "dict_of_module": (by(lambda: cfg.__dict__["window"]), functools.partial(setattr, cfg, "window")),
        "getattr": (by(lambda: getattr(cfg, "".join(("win", "dow")))), functools.partial(setattr, cfg, "window")),
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
        "format": (
            by(lambda: int("{0.window}".format(module))),  # noqa: UP030, UP032
            functools.partial(setattr, module, "window"),
        ),
        "format_of_a_constant": (
            (lambda form: by(lambda: int(form(module))))("{0.window}".format),
            functools.partial(setattr, module, "window"),
        ),
        "attribute_of_an_ordered_dict": (by(lambda: ordered.window), functools.partial(setattr, ordered, "window")),
    }
