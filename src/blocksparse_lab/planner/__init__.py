"""Plans the training of a block-sparse net on many devices: bytes on each, bytes between them, seconds per step.

`net` describes the model, `hardware` the devices, `formulas` the costs. `plan` combines them for each engine, and
`measure` finds the rates of this machine.
"""
