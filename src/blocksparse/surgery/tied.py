"""Weights that several modules share, and output layers that share theirs with an embedding."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {
        name: [other for other in group if other != name] for group in names.values() if group[1:] for name in group
    }


def untie_output_layers(model: nn.Module, only: Collection[str] | None = None) -> dict[str, str]:
    """Give linear layers that share their weight with embeddings an equal weight of their own, in place.

    An embedding costs no product, so that it can stay dense while the layer becomes block-sparse.

    Args:
        model: any module.
        only: names of weights to untie; all by default.

    Returns:
        the name of an embedding's weight for each of these layers' weights.

    >>> import torch
    >>> from blocksparse.surgery.tied import untie_output_layers
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(60, 32), "head": torch.nn.Linear(32, 60)})
    >>> model["head"].weight = model["words"].weight
    >>> untie_output_layers(model)
    {'head.weight': 'words.weight'}
    """
    untied = {}
    for name, others in tied_names(model).items():
        module, owners = _owner(model, name), {other: _owner(model, other) for other in others}
        embeddings = [other for other, owner in owners.items() if isinstance(owner, nn.Embedding)]
        known = all(type(owner) is nn.Linear or isinstance(owner, nn.Embedding) for owner in owners.values())
        if type(module) is nn.Linear and embeddings and known and (only is None or name in only):
            weight = module.weight
            module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
            untied[name] = embeddings[0]
    return untied


def forget_ties(model: nn.Module, names: Iterable[str]) -> None:
    """Let `tie_weights` of the transformers library leave these weights alone, also when the model is saved."""
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict):
        for name in names:
            keys.pop(name, None)


def tie(model: nn.Module, names: Mapping[str, str]) -> None:
    """Replace each parameter by the one with the other name."""
    for name, other in names.items():
        setattr(_owner(model, name), name.rpartition(".")[2], model.get_parameter(other))


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
