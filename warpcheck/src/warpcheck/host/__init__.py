"""The host side of a GPU that is not there: driver, runtime, memory, and what torch and CuTe DSL ask of them."""
