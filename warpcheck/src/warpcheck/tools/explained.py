"""Reasons why a mutant of a kernel's synchronisation survives, proved from the text around the changed line.

A rule holds for the runs of the mutation test. A survivor without a reason needs a reader, or another shape that kills
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from warpcheck.tools.mutations import Mutant

_OPCODE = re.compile(r"^\s*\{?\s*(?:@!?%?\w+\s+)?(?P<code>[a-z][\w.:]*)", re.ASCII)
_BLOCK_ENDS = re.compile(r"^\s*(?:[$\w]+:|(?:@!?%?\w+\s+)?(?:bra|brx|ret|exit)\b)", re.ASCII)
_MEMORY = re.compile(r"(?:ld|st|red|atom|cp|ldmatrix|stmatrix|wgmma|tcgen05|mbarrier|multimem)\b")
_MEETS = re.compile(r"(?:elect|shfl|vote|redux|match|activemask)\.sync|bar\.warp\.sync|(?:bar|barrier)\.(?:cta\.)?sync")
_MEETS_AND_MOVES = re.compile(r"(?:ldmatrix|stmatrix)\.sync|wgmma\.\w+\.sync|mma\.sync")
_SHARED_WRITE = re.compile(r"(?:st|red|atom)\.[\w.:]*shared|stmatrix|st\.async")
_SYNCHRONISES = re.compile(r"mbarrier\.(?:try|test)_wait|(?:bar|barrier)\.(?:cta\.)?sync|bar\.warp\.sync")

Code = Sequence[str]  # the lines of a PTX text
Rule = Callable[[Mutant, Code], bool]


def _opcodes(code: Code, lines: range) -> Iterator[str]:
    """Yield the opcodes of these lines, up to the boundary of the basic block."""
    for line in lines:
        if _BLOCK_ENDS.match(code[line]):
            return
        found = _OPCODE.match(code[line])
        if found:
            yield found["code"]


def _around(mutant: Mutant, code: Code) -> tuple[Iterator[str], Iterator[str]]:
    """Return the opcodes before and after the changed line in its basic block, nearest first."""
    at = mutant.line - 1
    return _opcodes(code, range(at - 1, -1, -1)), _opcodes(code, range(at + 1, len(code)))


def _lanes_meet_as_well(mutant: Mutant, code: Code) -> bool:
    """The lanes converge at another instruction, with no access between it and the barrier."""
    for opcodes, last in zip(
        _around(mutant, code), (_MEETS, re.compile(f"{_MEETS.pattern}|{_MEETS_AND_MOVES.pattern}"))
    ):
        for opcode in opcodes:
            if last.match(opcode):
                return True
            if _MEMORY.match(opcode):
                break
    return False


def _another_one(mutant: Mutant, code: Code) -> bool:
    """The same instruction comes before or after it, with no access between the two."""
    own = _OPCODE.match(mutant.before)
    for opcodes in _around(mutant, code):
        for opcode in opcodes:
            if own and opcode == own["code"]:
                return True
            if _MEMORY.match(opcode):
                break
    return False


def _after_reads_alone(mutant: Mutant, code: Code) -> bool:
    """No write to the shared memory of the fence follows the synchronisation before the fence."""
    if ".global" in mutant.before:
        return False
    before, _ = _around(mutant, code)
    for opcode in before:
        if _SHARED_WRITE.match(opcode):
            return False
        if _SYNCHRONISES.match(opcode):
            return True
    return False


def _is_taken_along(mutant: Mutant, code: Code) -> bool:
    """A commit of the same kind follows before a wait for a group."""
    own = _OPCODE.match(mutant.before)
    for opcode in _around(mutant, code)[1]:
        if own and opcode == own["code"]:
            return True
        if "wait" in opcode:
            return False
    return False


def _of_products(mutant: Mutant, _code: Code) -> bool:
    return mutant.before.startswith("wgmma.")


def _is_first(mutant: Mutant, _code: Code) -> bool:
    """The parity is the literal 1, so the wait passes at once in the first phase."""
    return re.search(r"\],\s*1\s*[,;]", mutant.before) is not None


def _always(_mutant: Mutant, _code: Code) -> bool:
    return True


# An access to operands or results of a product without a wait for its end is a finding in every order of events.
_UNTOUCHED = ("nothing touches what the products read and write before a later wait", _of_products)
# Kind of mutant -> rules: text of the table, and its condition. The first match counts.
RULES: dict[str, tuple[tuple[str, Rule], ...]] = {
    "commit": (("the next commit takes the group along", _is_taken_along), _UNTOUCHED),
    "group wait": (_UNTOUCHED,),
    "mbarrier wait": (("the first use of a place, which is free", _is_first),),
    # A product with a register written after the last fence is a finding, so no run had one.
    "wgmma fence": (("no register of a product was written after the fence before", _always),),
    "warp barrier": (("the lanes meet at a neighbouring instruction", _lanes_meet_as_well),),
    "grid dependency": (("one launch alone does not show what the grid before does", _always),),
    "proxy fence": (
        ("another fence of the proxy, no access between", _another_one),
        ("orders reads of shared memory before a later asynchronous write", _after_reads_alone),
    ),
    "mbarrier init fence": (("another fence, no access between", _another_one),),
    "tcgen05 fence": (("another fence, no access between", _another_one),),
    "memory fence": (("another fence, no access between", _another_one),),
}


def reason_of(mutant: Mutant, ptx: str) -> str:
    """Return the reason why the mutant of `ptx` survives; empty if no rule applies."""
    code = ptx.splitlines()
    return next((reason for reason, rule in RULES.get(mutant.kind, ()) if rule(mutant, code)), "")
