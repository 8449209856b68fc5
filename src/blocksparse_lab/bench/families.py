"""Families of models from the libraries transformers, timm and peft: small ones with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

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
TOWERS: dict[str, Any] = {
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
