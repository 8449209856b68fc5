"""Families of models from the libraries transformers, timm and peft, made block-sparse: do they compute the same?

    python benchmarks/families.py                       all families that are not in the table yet
    python benchmarks/families.py --only bert,llama     these, again
    python benchmarks/families.py --again               all of them again

Each is a small model with random weights, half of whose blocks `sparsify` keeps. The sparse model has to compute what
the one does that `densify` makes of it, and each weight has to get a gradient where the dense one gets one. Writes
families.json and families.md into docs/results after each family. Exit status 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse as bs
from blocksparse.checkpoint import read_json
from blocksparse.nn.module import BlockSparseModule, Weight
from blocksparse.surgery.prunable import survey

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NAME = "families"
BOUND = 1e-4  # of the relative error, float32 through whole models
GRADIENT_BOUND = 1e-3
SEED, DENSITY, BLOCK = 0, 0.5, 16

Made = tuple[nn.Module, dict[str, Any]]

# What configurations of the library transformers call their sizes. Each takes those that it knows.
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "attention_hidden_size")
DEPTH = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip
HEADS = (
    "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
INNER = ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
         "n_inner", "d_inner", "shared_expert_intermediate_size")  # fmt: skip
SMALL: dict[str, Any] = (
    dict.fromkeys(WIDTH, 64)
    | dict.fromkeys(DEPTH, 2)
    | dict.fromkeys(HEADS, 4)
    | dict.fromkeys(INNER, 96)
    | {"vocab_size": 96, "max_position_embeddings": 64, "max_source_positions": 64, "max_target_positions": 64}
    | {"head_dim": 16, "d_kv": 16, "image_size": 32, "patch_size": 8, "num_channels": 3}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "mask_token_id": 3}
)


def tokens(*shape: int) -> Tensor:
    return torch.randint(4, 96, shape)


def text() -> dict[str, Any]:
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def causal() -> dict[str, Any]:
    return {"input_ids": tokens(2, 12), "use_cache": False}


def two_texts() -> dict[str, Any]:
    return text() | {"decoder_input_ids": tokens(2, 7)}


def image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def larger_image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def image_and_text() -> dict[str, Any]:
    return image() | text()


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 1600)}


@dataclass(frozen=True)
class Transformers:
    """A family of the library transformers.

    Args:
        kind: its `model_type`.
        inputs: makes what the model is called with.
        config: settings in place of the small ones; `...` for the one that the family has by itself.
        auto: the class that makes the model.
    """

    kind: str
    inputs: Callable[[], dict[str, Any]]
    config: Mapping[str, Any]
    auto: str = "AutoModel"

    def __call__(self) -> Made:
        transformers = import_module("transformers")
        known = transformers.AutoConfig.for_model(self.kind)
        small = {name: value for name, value in SMALL.items() if name in vars(known)} | dict(self.config)
        settings = {name: value for name, value in small.items() if value is not ...}
        config = transformers.AutoConfig.for_model(self.kind, **settings)
        return getattr(transformers, self.auto).from_config(config), self.inputs()


def family(kind: str, inputs: Callable[[], dict[str, Any]], auto: str = "AutoModel", **config: Any) -> Transformers:
    return Transformers(kind, inputs, config, auto)


LM = "AutoModelForCausalLM"
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4}
AUDIO: dict[str, Any] = {
    "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip
TOWERS = {
    "text_config": SMALL | {"projection_dim": 64},
    "vision_config": SMALL | {"projection_dim": 64},
}

FAMILIES: dict[str, Callable[[], Made]] = {
    each.kind: each
    for each in (
        family("bert", text),
        family("roberta", text),
        family("distilbert", text, hidden_dim=96),
        family("electra", text),
        family("albert", text, embedding_size=32),
        family("xlnet", text),
        family("deberta", text),
        family("deberta-v2", text),
        family("mpnet", text),
        family("xlm-roberta", text),
        family("camembert", text),
        family("ernie", text),
        family("longformer", text, attention_window=4),
        family("modernbert", text),
        family("squeezebert", text, embedding_size=64),
        family("gpt2", causal, LM),
        family("gpt_neo", causal, LM, attention_types=[[["global", "local"], 1]]),
        family("gpt_neox", causal, LM),
        family("gptj", causal, LM, rotary_dim=8),
        family("codegen", causal, LM, rotary_dim=8),
        family("bloom", causal, LM),
        family("opt", causal, LM, word_embed_proj_dim=64),
        family("falcon", causal, LM),
        family("mpt", causal, LM),
        family("llama", causal, LM),
        family("mistral", causal, LM),
        family("mixtral", causal, LM, **MOE),
        family("qwen2", causal, LM),
        family("qwen2_moe", causal, LM, **MOE),
        family("qwen3", causal, LM),
        family("qwen3_moe", causal, LM, **MOE),
        family("olmo", causal, LM),
        family("olmoe", causal, LM, **MOE),
        family("gemma", causal, LM),
        family("gemma2", causal, LM),
        family("phi", causal, LM),
        family("phi3", causal, LM),
        family("stablelm", causal, LM),
        family("starcoder2", causal, LM),
        family("cohere", causal, LM),
        family("granite", causal, LM),
        family("gpt_oss", causal, LM, **MOE),
        family("deepseek_v3", causal, LM, **MOE, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=32,
               kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, head_dim=8),
        family("mamba", causal, LM, state_size=8),
        family("mamba2", causal, LM, state_size=8, num_heads=8, head_dim=16, n_groups=2),
        family("rwkv", causal, LM, context_length=32, rescale_every=0),
        family("jamba", causal, LM, **MOE, mamba_d_state=8, use_mamba_kernels=False),
        family("t5", two_texts),
        family("mt5", two_texts),
        family("bart", two_texts),
        family("mbart", two_texts),
        family("pegasus", two_texts),
        family("marian", two_texts),
        family("blenderbot", two_texts),
        family("switch_transformers", two_texts, num_experts=4, num_sparse_encoder_layers=1,
               num_sparse_decoder_layers=1),
        family("vit", image),
        family("deit", image),
        family("beit", image),
        family("dinov2", image),
        family("vit_mae", image, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_intermediate_size=64,
               decoder_num_attention_heads=4),
        family("swin", image, embed_dim=32, depths=[1, 1], num_heads=[2, 4], patch_size=4, window_size=4),
        family("convnext", image, hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, patch_size=4),
        family("convnextv2", image, hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, patch_size=4),
        family("resnet", image, embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1]),
        family("regnet", image, embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1], groups_width=64),
        family("mobilenet_v2", image),
        family("efficientnet", image, image_size=32),
        family("poolformer", image),
        family("segformer", image, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1],
               num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32),
        family("pvt", larger_image, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1],
               num_attention_heads=[1, 2, 2, 4], image_size=64, patch_size=...),
        family("levit", larger_image, hidden_sizes=[64, 64, 64], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
               key_dim=[16, 16, 16], image_size=64, patch_size=16),
        family("clip", image_and_text, **TOWERS, projection_dim=64),
        family("siglip", image_and_text, **TOWERS),
        family("detr", lambda: {"pixel_values": torch.randn(1, 3, 64, 64)}, use_timm_backbone=False,
               use_pretrained_backbone=False, num_queries=5,
               backbone_config={"model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 32, 64, 64],
                                "depths": [1, 1, 1, 1], "out_features": ["stage4"]}, backbone=None),
        family("vilt", lambda: text() | image()),
        family("whisper", lambda: {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": tokens(2, 7)},
               num_mel_bins=16, max_source_positions=32),
        family("wav2vec2", speech, **AUDIO),
        family("hubert", speech, **AUDIO),
        family("wavlm", speech, **AUDIO),
        family("speech_to_text", lambda: {"input_features": torch.randn(2, 32, 16), "decoder_input_ids": tokens(2, 7)},
               "AutoModelForSpeechSeq2Seq", input_feat_per_channel=16, conv_channels=64),
        family("time_series_transformer", lambda: {
            "past_values": torch.randn(2, 15), "past_time_features": torch.randn(2, 15, 1),
            "past_observed_mask": torch.ones(2, 15), "future_values": torch.randn(2, 4),
            "future_time_features": torch.randn(2, 4, 1)},
            prediction_length=4, context_length=8, num_time_features=1),
    )
}  # fmt: skip


def of_timm(name: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        timm = import_module("timm")
        size = options.get("img_size", 64)
        return timm.create_model(name, num_classes=10, **options), {"x": torch.randn(2, 3, size, size)}

    return make


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
FAMILIES |= {
    "timm resnet": of_timm("resnet18"),
    "timm vit": of_timm("vit_tiny_patch16_224", **VIT),
    "timm deit3": of_timm("deit3_small_patch16_224", **VIT),
    "timm swin": of_timm("swin_tiny_patch4_window7_224", img_size=56, embed_dim=32, depths=(1, 1), num_heads=(2, 4)),
    "timm convnext": of_timm("convnext_atto"),
    "timm mixer": of_timm("mixer_s32_224", img_size=64),
    "timm efficientnet": of_timm("efficientnet_b0"),
    "timm densenet": of_timm("densenet121"),
    "timm regnet": of_timm("regnetx_002"),
    "timm mobilenetv3": of_timm("mobilenetv3_small_050"),
}


def with_adapters(kind: str, inputs: Callable[[], dict[str, Any]], targets: list[str]) -> Callable[[], Made]:
    """A model whose layers have adapters of the library peft: they stay dense, the layers below become sparse."""

    def make() -> Made:
        peft = import_module("peft")
        model, given = family(kind, inputs)()
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model, given

    return make


FAMILIES |= {
    "peft lora bert": with_adapters("bert", text, ["query", "value"]),
    "peft lora llama": with_adapters("llama", causal, ["q_proj", "down_proj"]),
    "peft lora gpt2": with_adapters("gpt2", causal, ["c_attn"]),
}


# -- one family ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What was found for a family.

    Args:
        name: of the family.
        model: the class.
        taken: weights that became block-sparse.
        left: those that did not, how many for each reason.
        error: relative, of the largest of the outputs.
        gradients: weights whose gradient is there where that of the dense weight is, and agrees.
        failed: what went wrong, or "".
        refused: why there is nothing to be tried, or "".
        seconds: the time it took.
    """

    name: str
    model: str = ""
    taken: int = 0
    left: Mapping[str, int] | None = None
    error: float = math.nan
    gradients: int = 0
    failed: str = ""
    refused: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failed and (bool(self.refused) or (self.error <= BOUND and self.gradients == self.taken))


def tried(name: str) -> Row:
    """Makes the family's model, makes it block-sparse, and compares."""
    begin = time.perf_counter()
    torch.manual_seed(SEED)
    made = ""
    try:
        model, inputs = FAMILIES[name]()
        made = type(model).__name__
        drawn(model)
        found = compared(model.eval(), inputs)
    except ModuleNotFoundError as error:
        return Row(name, made, refused=f"{error}")
    except Exception as error:  # of any kind, of any library: the table has it
        return Row(name, made, failed=f"{type(error).__name__}: {first_line(error)}", seconds=since(begin))
    return Row(name, made, **found, seconds=since(begin))


@torch.no_grad()
def drawn(model: nn.Module) -> None:
    """Draws all parameters again, so that every layer matters: some families begin with scales and weights near 0."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1 / math.sqrt(max(parameter[0].numel(), 1)))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def compared(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.SparsityWarning)  # the table has it
        sparse = bs.sparsify(model, DENSITY, BLOCK, scope="layer", force=True)
    taken = [module for module in sparse.modules() if isinstance(module, BlockSparseModule)]
    reasons = [reason for _, reason in survey(model, BLOCK) if reason is not None]
    dense = bs.densify(sparse)
    outputs, of_dense = outputs_of(sparse, inputs), outputs_of(dense, inputs)
    if len(outputs) != len(of_dense) or not any(bool(y.any()) for y in outputs):
        raise bs.BlockSparseError.expected("outputs", f"{len(of_dense)}, not all of them 0", len(outputs))
    error = max(relative(found, expected) for found, expected in zip(outputs, of_dense, strict=True))
    return {
        "taken": len(taken),
        "left": dict(Counter(map(in_short, reasons)).most_common()),
        "error": error,
        "gradients": gradients(sparse, dense),
    }


def in_short(reason: str) -> str:
    """
    >>> in_short("tied to model.embedding.weight")
    'tied to an embedding or another layer'
    """
    return "tied to an embedding or another layer" if reason.startswith("tied to ") else reason


def outputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    torch.manual_seed(SEED)  # masks that models draw
    model.zero_grad()
    outputs = list(floats(model(**inputs)))
    generator = torch.Generator().manual_seed(SEED)
    loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs if y.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return [y.detach() for y in outputs]


def floats(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from floats(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from floats(each)


def relative(found: Tensor, expected: Tensor) -> float:
    """The relative l2 error; infinite where shapes differ or numbers are not finite."""
    size = float(expected.double().norm())
    if found.shape != expected.shape or not found.isfinite().all() or not math.isfinite(size):
        return math.inf
    return float((found.double() - expected.double()).norm()) / (size or 1.0)


def gradients(sparse: nn.Module, dense: nn.Module) -> int:
    """The number of block-sparse weights whose gradient is there, and agrees, exactly where the dense one's does.

    Compared are the products of gradient and weight, which do not depend on how either is stored.
    """
    of_dense, found = dict(dense.named_parameters()), []
    for name, module in sparse.named_modules():
        if isinstance(module, BlockSparseModule):
            ours, theirs = module.values, of_dense[name if isinstance(module, Weight) else f"{name}.weight"]
            found.append((product(ours), product(theirs)))
    most = max((ours[1] for ours, _ in found if ours is not None), default=0.0)
    good = 0
    for ours, theirs in found:
        if ours is None or theirs is None:
            good += ours is None and theirs is None
        else:  # some, of attention whose weights are all the same, are made of rounding errors alone
            good += abs(ours[0] - theirs[0]) <= max(GRADIENT_BOUND * ours[1], 1e-6 * most)
    return good


def product(parameter: Tensor) -> tuple[float, float] | None:
    """The sum of gradient times parameter, and the product of their norms; None without a gradient."""
    if parameter.grad is None:
        return None
    grad, value = parameter.grad.double(), parameter.detach().double()
    return float((grad * value).sum()), float(grad.norm() * value.norm())


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def since(begin: float) -> float:
    return round(time.perf_counter() - begin, 1)


# -- the table -----------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "timm", "peft"))
    passed = sum(row.passed for row in rows)
    tried = [row for row in rows if not row.refused]
    lines = [
        "# Families of models, made block-sparse",
        "",
        f"`python benchmarks/families.py` with {versions}:",
        f"{len(tried)} families, small models with random weights, of which {passed} pass. Of each weight half of the",
        f"blocks of {BLOCK} x {BLOCK} stay; then the outputs are those of the densified model to a relative error of",
        f"{BOUND:g} at most, and each block-sparse weight gets the",
        "gradient that the dense one gets. Weights that are left dense have a reason; `bs.report` gives it by name.",
        "RWKV has `rescale_every=0`: else it divides its weights in place for inference, which raises an error here.",
        "",
        "| family | model | taken | left dense, with the reason | error | gradients | |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        left = "; ".join(f"{count}: {reason}" for reason, count in (row.left or {}).items())
        verdict = row.failed or row.refused or ("passes" if row.passed else "FAILS")
        numbers = f"{row.error:.1e} | {row.gradients} of {row.taken}" if row.taken else " | "
        lines.append(f"| {row.name} | {row.model} | {row.taken} | {left} | {numbers} | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas between them")
    parser.add_argument("--again", action="store_true", help="also those that are in the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory to write to")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise SystemExit(f"families: --only: expected names out of {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    path = options.out / f"{NAME}.json"
    rows = {row["name"]: Row(**row) for row in read_json(path)["families"]} if path.is_file() else {}
    for name in chosen:
        if name in rows and rows[name].passed and not options.again and not options.only:
            continue
        row = rows[name] = tried(name)
        print(f"{name:24} {row.taken:4} weights, error {row.error:.1e}  {row.failed or row.refused or row.passed}")
        ordered = [rows[each] for each in FAMILIES if each in rows]
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"families": [asdict(each) for each in ordered]}, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(ordered))
    return int(not all(row.passed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
