"""Every configuration of a kernel that a call can ask for: whether it plans, or is refused with a reason, and compiles.

`problems` enumerates calls, `kernels` the kernels that the dispatcher's own plans give them, reduced to those that may
differ in whether they compile. `python -m tests.configurations` compiles them all.
"""
