"""Errors of every named case of the Blackwell forward on the emulated chip, as Markdown.

python -m tests.sm100.forward_errors [SEED]
"""

import sys

from fa4.oracle import cases

from .named import CASES
from .test_forward import KERNELS, poison_unused


def main(seed: int) -> None:
    print(f"Seed {seed}; a column's second number is what is allowed.\n")
    print("| case | out | lse |\n|---|--:|--:|")
    for name, case in CASES.items():
        problem = poison_unused(cases.make(case, seed))
        judged = cases.judge_forward(problem, *KERNELS.forward(problem, seed, "random"))
        cells = " | ".join(f"{j.error:.1e} / {j.allowed:.1e}" + ("" if j.right else " WRONG") for j in judged)
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
