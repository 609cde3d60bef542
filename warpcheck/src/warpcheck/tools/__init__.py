"""The laboratory: experiments with the machine: mutants, foreign kernels, single opcodes, comparisons with a chip."""
