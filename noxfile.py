"""The tests of what rests on torch, with other torches: `nox`, or `nox -s "torch(2.10.0)"` for one.

A torch from PyPI brings its CUDA packages: some 6 GB each, which is why this is no part of `make test`.
"""

import nox

TORCHES = ("2.10.0", "2.14.1", "2.15.0")  # beside the one of constraints.txt
_ON_TORCH = [
    *(f"tests/test_{name}.py" for name in ("api", "ops", "autograd", "compile", "fallback", "states", "compat")),
    *("tests/mods/test_flex.py", "tests/kvcache/test_torch.py", "tests/integrations"),
]

nox.options.default_venv_backend = "uv|virtualenv"


@nox.session
@nox.parametrize("version", TORCHES, ids=TORCHES)
def torch(session: nox.Session, version: str) -> None:
    session.install(f"torch=={version}", "numpy")
    session.install(f"torch=={version}", "-e", ".[test,hooks]")
    session.run("python", "-m", "pytest", "-q", "-m", "not soak and not gpu", *(session.posargs or _ON_TORCH))
