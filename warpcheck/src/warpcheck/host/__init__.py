"""Host side of an emulated GPU: driver, runtime, memory, and the interfaces of torch, CuTe DSL and Triton."""
