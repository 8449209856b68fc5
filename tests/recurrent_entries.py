"""The functions of recurrences on the CPU: the shape of each operand, and how to call them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import blocksparse as bs
from blocksparse.ops.lstm_gates import cpu as gates_of_a_step
from blocksparse.ops.recurrent import Steps, cpu

GATES = bs.patterns.random((32, 8), block_size=4, density=0.5, seed=0)
GRU_GATES = bs.patterns.random((24, 8), block_size=4, density=0.5, seed=0)
UNITS = bs.patterns.random((8, 8), block_size=4, density=0.5, seed=0)
RAGGED = Steps((2, 1))
TRAJECTORY = {"all_before": "before", "all_after": "after", "final": "final"}
STATES = {
    **dict.fromkeys(("h_before", "h_after", "c_before", "c_after"), (3, 8)),
    **dict.fromkeys(("h_final", "c_final"), (2, 8)),
}
GRADS = {"grad_y": (3, 8), "grad_h": (2, 8), "grad_c": (2, 8)}


def a_gates_forward():
    operands = {"z": (3, 20), "add": (3, 20), "gain": (20,), "c": (3, 5), "h_out": (3, 5), "c_out": (3, 5)}
    return {**operands, "gates_out": (3, 20)}, gates_of_a_step.forward


def a_gates_backward():
    operands = {"gates": (3, 20), "c_before": (3, 5), "c": (3, 5), "grad_h": (3, 5), "grad_y": (3, 5)}
    return {**operands, "grad_c": (3, 5), "grad_pre_out": (3, 20), "grad_c_out": (3, 5)}, gates_of_a_step.backward


def values_of(*layouts):
    return {f"values[{i}]": layout.values_shape for i, layout in enumerate(layouts)}


def weights_of(tensors, *layouts):
    return [(tensors[f"values[{i}]"], layout) for i, layout in enumerate(layouts)]


def states_of(tensors):
    names = [name for name in "hc" if f"{name}_before" in tensors]
    return [SimpleNamespace(**{at: tensors[f"{name}_{key}"] for at, key in TRAJECTORY.items()}) for name in names]


def an_lstm_forward(*layouts):
    """With two layouts a multiplicative one."""
    multiplied = dict.fromkeys(("factor", "of_h", "m"), (3, 8)) if len(layouts) == 2 else {}

    def call(pre, gates, **rest):
        of = cpu.MultiplicativeTerms(*(rest[name] for name in multiplied)) if multiplied else None
        cpu.forward(weights_of(rest, *layouts), RAGGED, pre, None, *states_of(rest), gates, of)

    return {**values_of(*layouts), "pre": (3, 32), **STATES, "gates": (3, 32), **multiplied}, call


def a_hidden_forward(kind, layout):
    features = layout.shape[0]

    def call(pre, bias, h_before, h_after, h_final, z, **rest):
        states = h_before, h_after, h_final
        cpu.hidden_forward(weights_of(rest, layout), RAGGED, kind, pre, None, bias, states, z)

    states = {name: STATES[name] for name in ("h_before", "h_after", "h_final")}
    operands = {**values_of(layout), "pre": (3, features), "bias": (features,)}
    return {**operands, **states, "z": (3, features)}, call


def a_hidden_backward(kind, layout):
    features = layout.shape[0]

    def call(z, pre, bias, h_before, h_after, grad_y, grad_h, **rest):
        saved = z, h_before, h_after
        cpu.hidden_backward(weights_of(rest, layout), RAGGED, kind, pre, bias, saved, grad_y, grad_h)

    operands = {**values_of(layout), "z": (3, features), "pre": (3, features), "bias": (features,)}
    states = {name: STATES[name] for name in ("h_before", "h_after")}
    return {**operands, **states, "grad_y": (3, 8), "grad_h": (2, 8)}, call


def an_lstm_backward(*layouts):
    operands = {**values_of(*layouts), "gates": (3, 32), "c_before": (3, 8), "c_after": (3, 8), **GRADS}
    multiplied = dict.fromkeys(("factor", "of_h", "grad_factor", "grad_of_h"), (3, 8)) if len(layouts) == 2 else {}

    def call(gates, c_before, c_after, **rest):
        of = ()
        if multiplied:
            factor, of_h, *grads = (rest[name] for name in multiplied)
            of = None, cpu.MultiplicativeTerms(factor, of_h, of_h), grads
        kept, grads = (gates, c_before, c_after), [rest[name] for name in GRADS]
        return cpu.backward(weights_of(rest, *layouts), RAGGED, kept, grads, *of)

    return {**operands, **multiplied}, call


def norms_of(*names):
    sizes = {"z": (3, 32), "z_scale": (3, 4), "normed": (2, 3, 8), "given": (2, 3, 8), "scale": (2, 3, 1)}
    return {name: sizes[name] for name in names or sizes}


AFFINE = [torch.ones(8), torch.ones(8), torch.ones(32)]


def a_small_world_forward(*layouts):
    operands = {**values_of(*layouts), "factor": (3, 8), "term": (3, 8), **STATES, "gates": (3, 32)}

    def call(factor, term, gates, **rest):
        norms = cpu.Norms(*(rest[name] for name in norms_of()))
        sizes = weights_of(rest, *layouts), RAGGED, (factor, term), None
        cpu.small_world_forward(*sizes, AFFINE, AFFINE, 1e-5, *states_of(rest), gates, norms)

    return {**operands, **norms_of()}, call


def a_small_world_backward(*layouts):
    kept = {"gates": (3, 32), "c_before": (3, 8), "c_after": (3, 8)}
    into = {"grad_factor": (3, 8), "grad_term": (3, 8), "grad_z": (3, 32), "grad_taken": (2, 3, 8)}
    into |= {"grad_gains": (48,), "grad_biases": (48,)}

    def call(factor, **rest):
        of = {of: [rest[name] for name in names] for of, names in (("kept", kept), ("grads", GRADS), ("into", into))}
        norms = cpu.Norms(*(rest[name] for name in norms_of()))
        sizes = weights_of(rest, *layouts), RAGGED, factor, None, AFFINE, AFFINE
        gradients = cpu.SmallWorldGradients(*of["into"])
        return cpu.small_world_backward(*sizes, of["kept"], norms, of["grads"], gradients)

    return {**values_of(*layouts), "factor": (3, 8), **kept, **norms_of(), **GRADS, **into}, call


OF_ALL_STEPS = {
    "lstm_forward": an_lstm_forward(GATES),
    "lstm_backward": an_lstm_backward(GATES),
    "lstm_forward_multiplied": an_lstm_forward(GATES, UNITS),
    "lstm_backward_multiplied": an_lstm_backward(GATES, UNITS),
    "hidden_forward": a_hidden_forward("gru", GRU_GATES),
    "hidden_backward": a_hidden_backward("gru", GRU_GATES),
    "small_world_forward": a_small_world_forward(UNITS, UNITS, GATES),
    "small_world_backward": a_small_world_backward(UNITS, UNITS, GATES),
}
ENTRIES = {"gates_forward": a_gates_forward(), "gates_backward": a_gates_backward(), **OF_ALL_STEPS}
