"""Errors of every named case of the Blackwell backward on the emulated chip, as Markdown.

python -m tests.sm100.backward_errors [SEED]
"""

import sys

from fa4.oracle import cases

from .test_backward import KERNELS, SERVED, judge_gradients, rows_for


def main(seed: int) -> None:
    print(f"Seed {seed}; a column's second number is what is allowed.\n")
    print("| case | CTAs | dq | dk | dv | dsink |\n|---|--:|--:|--:|--:|--:|")
    for name, case in SERVED.items():
        problem = cases.make(case, seed)
        for tiles in rows_for(problem):
            judgements = {
                j.name: j for j in judge_gradients(problem, KERNELS.gradients(problem, seed, "random", tiles))
            }
            cells = [judgements.get(of) for of in ("dq", "dk", "dv", "dsink")]
            texts = ("" if j is None else f"{j.error:.1e} / {j.allowed:.1e}" + " WRONG" * (not j.right) for j in cells)
            print(f"| {name} | {tiles.ctas} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
