"""Random calls of the compiled core: `make fuzz`, and `make sanitize` under the sanitizers.

A case is a dictionary of numbers and names, drawn from (seed, index), which determines the whole test: the operation,
the layout, the strides of operands, the seed of their elements, and the reason if the library must refuse it. Each case
runs on every instruction set of the CPU. Operands and outputs are separate allocations filled with NaN, and results are
compared with float64.
"""
