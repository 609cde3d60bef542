"""Classes and their instances: attributes, methods that Python calls, enums, texts."""

import dataclasses
import enum
import functools

from tests.mods.read.mask import by

WINDOW = 3
text, as_dict = repr, dataclasses.asdict


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


def set_global(name):
    def change(value):
        globals()[name] = value

    return change


def prepare():
    for x, name in ((Class, "window"), (Mode.NEAR, "own"), (Mode, "later"), (Flags.LEFT | Flags.RIGHT, "window")):
        setattr(x, name, 3)


def restore():
    global WINDOW
    WINDOW, Class.settings["window"] = 3, 3
    Moved.__bases__ = (Class,)
    if "__init__" in vars(Bare):
        del Bare.__init__
    if "window" in vars(Derived):
        del Derived.window


def cases():
    config, told, slots = Config(), Told(), Slots(3)

    def by_match(b, h, q_idx, kv_idx):
        match config:
            case Config(window=window):
                return q_idx - kv_idx <= window

    def set_base(value):
        Moved.__bases__ = (type("Base", (), {"window": value}),)

    def set_init(value):
        Bare.__init__ = lambda self: setattr(self, "window", value)

    def of_text(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= int(f"{config!r}"[14])

    return {
        "class": (by(lambda: Class.window), functools.partial(setattr, Class, "window")),
        "dict_of_class": (
            by(lambda: Class.settings["window"]),
            functools.partial(Class.settings.__setitem__, "window"),
        ),
        "base_class": (by(lambda: Derived.window), functools.partial(setattr, Class, "window")),
        "class_over_base": (by(lambda: Derived().window), functools.partial(setattr, Derived, "window")),
        "static_method": (by(lambda: Class.of_static()), set_global("WINDOW")),
        "class_method": (by(lambda: Derived.of_class()), functools.partial(setattr, Derived, "window")),
        "instance": (by(lambda: config.window), functools.partial(setattr, config, "window")),
        "property": (by(lambda: config.doubled // 2), functools.partial(setattr, config, "window")),
        "cached_property": (by(lambda: config.cached), functools.partial(config.__dict__.__setitem__, "cached")),
        "getitem": (by(lambda: config[1]), functools.partial(setattr, config, "window")),
        "match": (by_match, functools.partial(setattr, config, "window")),
        "text": (of_text, functools.partial(setattr, config, "window")),
        "text_by_another_name": (by(lambda: int(text(told)[12])), functools.partial(setattr, told, "window")),
        "text_by_percent": (by(lambda: int(("%r" % told)[12])), functools.partial(setattr, told, "window")),  # noqa: UP031
        "asdict_by_another_name": (
            by(lambda: as_dict(told)["window"]),
            functools.partial(setattr, told, "window"),
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
        "slots": (by(lambda: slots.window), functools.partial(setattr, slots, "window")),
        "getattr_of_instance": (by(lambda: Missing().anything), set_global("WINDOW")),
        "made_within": (by(lambda: Made().window), set_global("WINDOW")),
        "bound_method": (config.method, functools.partial(setattr, config, "window")),
        "callable_object": (config, functools.partial(setattr, config, "window")),
    }
