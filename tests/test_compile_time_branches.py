"""One way to write a compile-time branch of device code, see docs/adding-a-chip.md.

In a function decorated with `cute.jit` or `cute.kernel` a plain branch is a run-time branch, so a condition that is
known while the kernel is traced stands in `const_expr(...)`. Other functions run as Python while a kernel is traced:
all their branches are compile-time branches, and `const_expr` would say nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fa4"
FOLDERS = ("core", "fwd", "bwd", "pipeline", "sm80", "sm90", "sm100", "sm120")
FILES = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]


def is_compiled(function: ast.FunctionDef) -> bool:
    names = {ast.unparse(decorator) for decorator in function.decorator_list}
    return bool(names & {"cute.jit", "cute.kernel"})


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, those of functions inside it too."""
    for statement in function.body:
        yield from ast.walk(statement)


def outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions that are inside no other function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        else:
            yield from outer_functions(child)


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def constants_of(function: ast.FunctionDef) -> set[str]:
    """Names that hold compile-time values: `cfg`, parameters annotated so, counters of loops that are unrolled."""
    arguments = (*function.args.args, *function.args.kwonlyargs)
    names = {a.arg for a in arguments if a.annotation and "Constexpr" in ast.unparse(a.annotation)} | {"cfg"}
    for node in own_nodes(function):
        if isinstance(node, ast.For) and called(node.iter).endswith("range_constexpr"):
            names.add(ast.unparse(node.target))
    return names


def is_constant(node: ast.AST, names: set[str]) -> bool:
    """Whether the syntax alone tells that a condition is known while the kernel is traced."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return node.id in names or node.id.isupper()
    if isinstance(node, ast.Attribute):  # a field of another parameter may be a run-time value
        return "cfg" in ast.unparse(node).split(".")
    if isinstance(node, ast.Call):
        return called(node) == "isinstance"
    if isinstance(node, ast.Compare):
        is_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        return is_identity or all(is_constant(x, names) for x in (node.left, *node.comparators))
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp):
        parts = [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
        return all(is_constant(x, names) for x in parts)
    return False


def plain_compile_time_branches(text: str) -> list[str]:
    found = []
    for function in filter(is_compiled, outer_functions(ast.parse(text))):
        names = constants_of(function)
        branches = [n for n in own_nodes(function) if isinstance(n, ast.If | ast.While | ast.IfExp)]
        found += [f"line {n.lineno}: {ast.unparse(n.test)}" for n in branches if is_constant(n.test, names)]
    return found


def superfluous(text: str) -> list[str]:
    """Uses of `const_expr` in functions without run-time branches, or by another name."""
    tree, found = ast.parse(text), []
    for function in outer_functions(tree):
        if not is_compiled(function):
            found += [f"line {n.lineno}: not in a decorated function" for n in own_nodes(function) if is_marked(n)]
    return found + [f"line {n.lineno}: not the bare name" for n in ast.walk(tree) if called(n) == "cutlass.const_expr"]


def is_marked(node: ast.AST) -> bool:
    return called(node).endswith("const_expr")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_compile_time_branches_are_written_in_one_way(path):
    text = path.read_text()
    assert not plain_compile_time_branches(text)
    assert not superfluous(text)


BODY = (
    "@cute.jit\ndef role(context, flag: cutlass.Constexpr[bool], x):\n    cfg = context.cfg\n    if {}:\n        pass\n"
)


@pytest.mark.parametrize("condition", ["cfg.split", "not cfg.split", "context.cfg.rows > ROWS", "flag", "x is None"])
def test_a_plain_compile_time_branch_is_found(condition):
    assert plain_compile_time_branches(BODY.format(condition))
    assert not plain_compile_time_branches(BODY.format(f"const_expr({condition})"))


@pytest.mark.parametrize("condition", ["x > 0", "x < cfg.rows", "cfg.split and x > 0", "context.args.x > 0"])
def test_a_run_time_branch_is_left_alone(condition):
    assert not plain_compile_time_branches(BODY.format(condition))


def test_a_superfluous_mark_is_found():
    assert superfluous("def helper(cfg):\n    return 1 if const_expr(cfg.split) else 2\n")
    assert superfluous(BODY.format("cutlass.const_expr(cfg.split)"))
    assert not superfluous(BODY.format("const_expr(cfg.split)"))
