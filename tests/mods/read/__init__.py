"""What a traced function reads, with a change of each: variables and modules, classes, functions and tensors.

Each module has `cases()`: {name: (function, change)}, where change(5) makes what the mask function reads, a window of
3, a 5; `prepare` sets what they read, and `restore` puts it back.
"""

from . import functions, names, objects

PARTS = names, objects, functions


def cases() -> dict:
    return {name: case for part in PARTS for name, case in part.cases().items()}


def prepare() -> None:
    for part in PARTS:
        part.prepare()


def restore() -> None:
    for part in PARTS:
        part.restore()
