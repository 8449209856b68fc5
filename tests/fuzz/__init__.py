"""Random calls of the compiled core, without end: `make fuzz`, and `make sanitize` under the sanitizers.

A case is a dictionary of plain numbers and names, drawn from (seed, index), which says all: the operation, the layout,
how its operands lie in memory, the seed of their numbers, and the reason if the library must refuse it. Each runs on
every instruction set that the CPU has, on operands and outputs that are allocations of their own, full of NaN where
nothing is, against float64.
"""
