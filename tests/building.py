"""What tests build: kernels that are files, in no time and in other processes, and those of a problem."""

import os
import time
from pathlib import Path

from fa4.api.ahead import prepare, requests_of
from fa4.runtime.device import chip_by_number
from fa4.runtime.jit import Request


class Kernel:
    def export_to_c(self, path, symbol):
        Path(path).write_bytes(b"no object file")


class Build:
    """Adds a line to a log, then builds, fails, or ends its process. (A class: bound arguments can be pickled.)"""

    def __init__(self, log, how="builds"):
        self.log, self.how = str(log), how

    def __call__(self):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        if self.how == "fails":
            raise ValueError("no such tile")
        if self.how == "ends":
            os._exit(3)
        return Kernel()


def request(name, log, how="builds", number=90):
    return Request((name,), Build(log, how), chip_by_number(number), ())


def compiled_ahead(directory, problem):
    """Compile the kernels of an `AheadProblem` in this process; return their (target, key)."""
    requests, folder = requests_of(problem), prepare(directory)
    for request in requests.values():
        request.put_into(folder)
    return list(requests)
