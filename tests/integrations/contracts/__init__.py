"""Contracts of serving engines, as files, so that tests hold fa4 to them where the engine is not installed.

    python -m tests.integrations.contracts vllm      # or sglang; writes the file from the installed package

A file lists, of the classes that fa4 derives from or that call it, names, parameters and defaults; and what the engine
itself answered about fa4's backends. It contains nothing of the engine's code. The page of columns,
docs/results/serving-engines.md, is written from the files.
"""

import inspect
import json
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def load(engine: str) -> dict:
    return json.loads((HERE / f"{engine}.json").read_text())


def save(engine: str, contract: dict) -> None:
    (HERE / f"{engine}.json").write_text(json.dumps(contract, indent=1) + "\n")


def shown(value: Any) -> Any:
    """A default in JSON: itself if it is plain, else how it is written."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [shown(x) for x in value]
    return None if callable(value) else repr(value).split(" object at ")[0]


def parameters(function: Any) -> list[dict]:
    """Names of a function's parameters, in order, and the defaults of those that have one."""
    return [
        {"name": x.name, "kind": x.kind.name}
        | ({} if x.default is inspect.Parameter.empty else {"default": shown(x.default)})
        for x in inspect.signature(function).parameters.values()
    ]


def described(cls: type) -> dict:
    """What a class itself defines: methods with their parameters, attributes with their defaults, fields, members."""
    if issubclass(cls, Enum):
        return {"members": [member.name for member in cls]}
    methods, attributes = {}, {}
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        is_dunder = name.startswith("__") and name != "__init__"
        if is_dunder or isinstance(value, (property, type)):
            continue
        if inspect.isfunction(function):
            kind = type(value).__name__ if value is not function else "method"
            methods[name] = {"kind": kind, "parameters": parameters(function)}
            if getattr(function, "__isabstractmethod__", False):
                methods[name]["abstract"] = True
        elif not name.startswith("_abc"):
            attributes[name] = shown(value)
    contract = {"methods": methods, "attributes": attributes, "annotated": sorted(getattr(cls, "__annotations__", {}))}
    return contract | ({"fields": [x.name for x in fields(cls)]} if is_dataclass(cls) else {})


def classes(paths: list[str]) -> dict[str, dict]:
    """Descriptions by name. paths: "module:Class"."""
    found = {}
    for path in paths:
        module, name = path.split(":")
        found[name] = {"module": module} | described(getattr(import_module(module), name))
    return found


def differences(contract: dict, cls: type) -> list[str]:
    """How a class of ours differs from what the engine calls: methods without a parameter that the engine passes, in
    another order, or with a further one that the engine does not pass."""
    wrong = []
    for name, method in contract["methods"].items():
        ours = inspect.getattr_static(cls, name, None)
        if ours is None:
            wrong += [f"{cls.__name__} has no {name}"] if method.get("abstract") else []
            continue
        function = getattr(ours, "__func__", ours)
        if not getattr(function, "__module__", "").startswith("fa4."):  # inherited
            if getattr(function, "__isabstractmethod__", False):
                wrong.append(f"{cls.__name__}.{name} is abstract")
            continue
        kind = "method" if function is ours else type(ours).__name__
        if kind != method["kind"] and {kind, method["kind"]} != {"staticmethod", "classmethod"}:
            wrong.append(f"{cls.__name__}.{name} is a {kind}, expected a {method['kind']}")
        got = [x for x in inspect.signature(function).parameters.values() if x.name not in ("self", "cls")]
        expected = [x for x in method["parameters"] if x["name"] not in ("self", "cls")]
        named = [x["name"] for x in expected if "VAR" not in x["kind"]]
        takes_more = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in got)
        plain = [x for x in got if "VAR" not in x.kind.name]
        names = [x.name for x in plain]
        if names[: len(named)] != named and not (takes_more and named[: len(names)] == names):
            wrong.append(f"{cls.__name__}.{name} takes {names}, expected {named}")
        for x in plain[len(named) :]:
            if x.default is inspect.Parameter.empty:
                wrong.append(f"{cls.__name__}.{name} requires {x.name}, which the engine does not pass")
        for x, theirs in zip(plain, expected):
            if "default" in theirs and x.default is inspect.Parameter.empty:
                wrong.append(f"{cls.__name__}.{name} requires {x.name}, which the engine may leave out")
    return wrong
