"""Make checkpoints block-sparse: our byte models, folders of the transformers library, plain files of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.conversion import Report, report, sparsify
from blocksparse.errors import BlockSparseError

from ..folders import make_folder, report_os_errors
from ..models.gpt import GPT
from . import charlm, gpt, language_model

FILE = "model.safetensors"
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")


@dataclass(frozen=True)
class StoredModel:
    """A model from disk, and how to store its block-sparse version.

    Args:
        model: on the CPU.
        file: name of its checkpoint in a folder.
        about: metadata of the checkpoint.
        tensors: returns the tensors of a model to store.
        skip: weights that may not be used in products.
        beside: further files to copy.
        whole: writes a whole model into a folder, instead of a checkpoint with `tensors` and `about`.
    """

    model: nn.Module
    file: str
    about: dict[str, Any]
    tensors: Callable[[nn.Module], Mapping[str, Tensor]]
    skip: tuple[str, ...] = ()
    beside: tuple[Path, ...] = field(default=())
    whole: Callable[[nn.Module, Path], object] | None = None


def open_model(path: str | Path) -> StoredModel:
    """Open a byte model's checkpoint or run, a folder of the transformers library, or a plain file of weights."""
    path = Path(path)
    if path.is_dir():
        if (path / "last.safetensors").is_file():  # first, because a run has a config.json too
            return _language_model(path / "last.safetensors")
        if (path / "config.json").is_file():
            return _transformers(path)
        wanted = "one with last.safetensors (a run), or with config.json and model.safetensors (transformers)"
        raise BlockSparseError.expected("the folder", wanted, path)
    if not path.is_file():
        raise BlockSparseError.expected("model", "a safetensors file or a folder", f"{path}, which is not there")
    try:
        with safe_open(path, framework="pt") as file:
            ours = (file.metadata() or {}).get("format") == checkpoint.FORMAT
            tensors = {} if ours else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BlockSparseError.expected(str(path), "a whole safetensors file", error) from error
    return _language_model(path) if ours else _plain(path, tensors)


def sparsify_model(stored: StoredModel, skip: tuple[str, ...] = (), **options: Any) -> tuple[nn.Module, Report]:
    """Return the block-sparse model, changed in place, and its report; options are those of `blocksparse.sparsify`."""
    model = sparsify(stored.model, skip=(*stored.skip, *skip), inplace=True, **options)
    return model, report(model, options.get("tokens", 64))


def save(stored: StoredModel, model: nn.Module, made: Report, out: str | Path) -> Path:
    """Write the model, its further files and report.json into a folder; return the checkpoint's path."""
    out = Path(out)
    with report_os_errors(out):
        for path in stored.beside:
            shutil.copyfile(path, out / path.name)
    if stored.whole is None:
        checkpoint.save(out / stored.file, stored.tensors(model), stored.about)
    else:
        try:
            stored.whole(model, out)
        except (OSError, SafetensorError) as error:
            raise BlockSparseError.expected("out", "a folder to write to", f"{out} ({error})") from error
    checkpoint.write_text(out / "report.json", json.dumps(made.as_dict(), indent=1) + "\n")
    return out / stored.file


def folder(out: str | Path, model: str | Path) -> Path:
    """Make the folder to write to before any work; raise if it is the model's own."""
    out, model = Path(out), Path(model)
    if out.resolve() in (model.resolve(), model.resolve().parent):
        raise BlockSparseError.expected("out", "another folder than the model's", out)
    return make_folder(out)


def _language_model(path: Path) -> StoredModel:
    """Open a byte model's checkpoint."""
    model = language_model.load(path)
    kind = gpt.KIND if isinstance(model, GPT) else charlm.KIND
    about = {"task": {"kind": kind, "model": asdict(model.config)}, "sparsified": True}
    return StoredModel(
        model,
        "last.safetensors",
        about,
        lambda model: {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
    )


def _transformers(path: Path) -> StoredModel:
    """Open a folder of the transformers library."""
    try:
        import transformers
    except ImportError as error:
        message = f"a folder with config.json needs transformers ({error}): pip install transformers"
        raise BlockSparseError(message) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        names = config.architectures or ["AutoModel"]
        model = getattr(transformers, names[0]).from_pretrained(
            path, config=config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # depends on file and architecture
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise BlockSparseError.expected(str(path), "a model that transformers loads", first[0]) from error
    # Copy the tokenizer and its like, so that the folder can be pushed as a whole model.
    beside = [file for file in path.iterdir() if file.suffix in _BESIDE and file.is_file()]
    beside = [file for file in beside if not file.name.endswith(".index.json") and file.name != "config.json"]

    def write(model: Any, out: Path) -> None:
        model.save_pretrained(out)

    return StoredModel(model.eval(), FILE, {}, lambda model: model.state_dict(), beside=tuple(beside), whole=write)


def _plain(path: Path, tensors: Mapping[str, Tensor]) -> StoredModel:
    """Return a model with a linear layer per matrix, by the matrix's name."""
    model = nn.Module()
    matrices = {name: x for name, x in tensors.items() if x.dim() == 2 and x.is_floating_point()}
    if not matrices:
        raise BlockSparseError.expected(str(path), "2-D weights", f"{len(tensors)} tensors, none of them one")
    places = {name: _layer_name(name, matrices) for name in matrices}
    for name, place in places.items():
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(matrices[name])
        *above, last = place.split(".")
        parent = model
        for part in above:
            parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        parent._modules[last] = layer

    def stored(model: nn.Module) -> dict[str, Tensor]:
        state = dict(tensors)
        for name, place in places.items():
            layer = model.get_submodule(place)
            if type(layer) is not nn.Linear:
                del state[name]
                # Name the weight as a layer's state dict does, or as an LSTM with several weights does.
                prefix = name.removesuffix("weight") if name.split(".")[-1] == "weight" else f"{name}."
                state |= {prefix + part: tensor for part, tensor in layer.state_dict().items()}
        return state

    tables = tuple(place for name, place in places.items() if "emb" in name)
    return StoredModel(model, FILE, {"sparsified": True}, stored, tables)


def _layer_name(name: str, matrices: Mapping[str, Tensor]) -> str:
    """Return the name of a weight's layer: the weight's own name if other weights are below the layer's."""
    layer = name.removesuffix(".weight")
    return name if any(other.startswith(f"{layer}.") for other in matrices if other != name) else layer
