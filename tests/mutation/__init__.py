"""Would a mistake of value or logic in the package's Python be noticed? `python -m tests.mutation --help`.

`plant` makes the mistakes, `areas` says which tests answer for which file and which mistakes change no result,
`workshop` runs the tests over a spoilt copy of the tree, `__main__` is the command.
`warpcheck.tools.mutate` asks the same of synchronising instructions, in PTX.

Why a runner of our own: mutmut (3.8) leaves decorated functions alone, which is most device code, and moves the
others into trampolines, while CuTe DSL reads a function's source text. cosmic-ray (8.7) has one test command for all
files, where here a kernel's tests take minutes and a table's take a second. Neither swaps arguments, drops keywords
and statements, or takes another field of the same record.
"""
