"""Functions: their defaults, code and attributes, partials, bound methods; tensors."""

import functools

import torch

from tests.mods.read.mask import by

DICT = {"window": 3}


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
    return 3


def settings(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= settings.window


def prepare():
    settings.window = helper.window = 3


def restore():
    DICT["window"] = 3


def cases():
    table = [torch.tensor([3.0]), torch.tensor([5.0])]
    marked = torch.zeros(2)
    marked.window = 3
    layer, partial = Layer(), functools.partial(lambda w, b, h, q_idx, kv_idx: q_idx - kv_idx <= w["w"], {"w": 3})
    keywords = functools.partial(lambda b, h, q_idx, kv_idx, window: q_idx - kv_idx <= window, window=3)
    partial.window = 3
    square = torch.zeros(2, 2)
    narrow = torch.zeros(20).as_strided((2, 3), (3, 1))

    def with_keyword(b, h, q_idx, kv_idx, *, window=3):
        return q_idx - kv_idx <= window

    def with_default(b, h, q_idx, kv_idx, window=3):
        return q_idx - kv_idx <= window

    def with_code(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 3

    def other_code(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 5

    def set_default(value):
        with_default.__defaults__ = (value,)

    return {
        "function_attribute": (settings, functools.partial(setattr, settings, "window")),
        "attribute_of_a_partial": (by(lambda: partial.window), functools.partial(setattr, partial, "window")),
        "attributes_of_a_function": (
            by(lambda: helper.window),
            lambda value: setattr(helper, "__dict__", {"window": value}),
        ),
        "stride": (by(lambda: narrow.stride(0)), lambda value: narrow.as_strided_((2, 3), (value, 1))),
        "version": (by(lambda: 3 if square._version == 0 else 5), lambda value: square.zero_()),
        "gradient": (by(lambda: 3 if square.grad is None else 5), lambda value: setattr(square, "grad", square + 1)),
        "default": (with_default, set_default),
        "keyword_default": (with_keyword, functools.partial(with_keyword.__kwdefaults__.__setitem__, "window")),
        "code": (with_code, lambda value: setattr(with_code, "__code__", other_code.__code__)),
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
