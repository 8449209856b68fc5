"""Small models of the families in transformers, timm and peft, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
ModelAndInputs = tuple[nn.Module, Inputs]

# Names of sizes in configurations of transformers; each configuration gets those that it has.
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


def text() -> Inputs:
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def causal() -> Inputs:
    return {"input_ids": tokens(2, 12), "use_cache": False}


def two_texts() -> Inputs:
    return text() | {"decoder_input_ids": tokens(2, 7)}


def image(count: int = 2, size: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(count, 3, size, size)}


def image_and_text() -> Inputs:
    return image() | text()


def text_and_image() -> Inputs:
    return text() | image()


def speech() -> Inputs:
    return {"input_values": torch.randn(2, 1600)}


def features(*shape: int) -> Inputs:
    return {"input_features": torch.randn(shape), "decoder_input_ids": tokens(2, 7)}


def series() -> Inputs:
    shapes = {"past_values": (2, 15), "past_time_features": (2, 15, 1), "future_values": (2, 4)}
    shapes |= {"future_time_features": (2, 4, 1)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"past_observed_mask": torch.ones(2, 15)}


@dataclass(frozen=True)
class Transformers:
    """A family of the library transformers, by its `model_type`: its inputs, and the class that makes the model."""

    kind: str
    inputs: Callable[[], Inputs]
    auto: str = "AutoModel"

    def __call__(self) -> ModelAndInputs:
        transformers = import_module("transformers")
        known = transformers.AutoConfig.for_model(self.kind)
        small = {name: value for name, value in SMALL.items() if name in vars(known)} | CONFIGS.get(self.kind, {})
        settings = {name: value for name, value in small.items() if value is not ...}
        config = transformers.AutoConfig.for_model(self.kind, **settings)
        return getattr(transformers, self.auto).from_config(config), self.inputs()


MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4}
AUDIO: dict[str, Any] = {
    "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip
TOWERS = {name: SMALL | {"projection_dim": 64} for name in ("text_config", "vision_config")}
STAGES = {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
TWO_STAGES: dict[str, Any] = {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "patch_size": 4}
RESNET: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]}
BACKBONE = {"model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1],
            "out_features": ["stage4"]}  # fmt: skip

# Settings that replace the small ones of a family; `...` keeps the family's default.
CONFIGS: dict[str, dict[str, Any]] = {
    "distilbert": {"hidden_dim": 96},
    "albert": {"embedding_size": 32},
    "longformer": {"attention_window": 4},
    "squeezebert": {"embedding_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "opt": {"word_embed_proj_dim": 64},
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), MOE),
    "deepseek_v3": {**MOE, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
                    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "rwkv": {"context_length": 32, "rescale_every": 0},
    "jamba": {**MOE, "mamba_d_state": 8, "use_mamba_kernels": False},
    "switch_transformers": {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "vit_mae": {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 64,
                "decoder_num_attention_heads": 4},
    "swin": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "window_size": 4},
    **dict.fromkeys(("convnext", "convnextv2"), TWO_STAGES),
    "resnet": RESNET,
    "regnet": RESNET | {"groups_width": 64},
    "efficientnet": {"image_size": 32},
    "segformer": STAGES | {"decoder_hidden_size": 32},
    "pvt": STAGES | {"image_size": 64, "patch_size": ...},
    "levit": {"hidden_sizes": [64, 64, 64], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
              "key_dim": [16, 16, 16], "image_size": 64, "patch_size": 16},
    "clip": TOWERS | {"projection_dim": 64},
    "siglip": TOWERS,
    "detr": {"use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 5,
             "backbone_config": BACKBONE, "backbone": None},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 32},
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm"), AUDIO),
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 64},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "num_time_features": 1},
}  # fmt: skip

BY_INPUTS: tuple[tuple[Callable[[], Inputs], str], ...] = (
    (text, "bert roberta distilbert electra albert xlnet deberta deberta-v2 mpnet xlm-roberta camembert ernie"),
    (text, "longformer modernbert squeezebert"),
    (causal, "gpt2 gpt_neo gpt_neox gptj codegen bloom opt falcon mpt llama mistral mixtral qwen2 qwen2_moe qwen3"),
    (causal, "qwen3_moe olmo olmoe gemma gemma2 phi phi3 stablelm starcoder2 cohere granite gpt_oss deepseek_v3 mamba"),
    (causal, "mamba2 rwkv jamba"),
    (two_texts, "t5 mt5 bart mbart pegasus marian blenderbot switch_transformers"),
    (image, "vit deit beit dinov2 vit_mae swin convnext convnextv2 resnet regnet mobilenet_v2 efficientnet poolformer"),
    (image, "segformer"),
    (partial(image, size=64), "pvt levit"),
    (image_and_text, "clip siglip"),
    (partial(image, 1, 64), "detr"),
    (text_and_image, "vilt"),
    (partial(features, 2, 16, 64), "whisper"),
    (speech, "wav2vec2 hubert wavlm"),
    (partial(features, 2, 32, 16), "speech_to_text"),
    (series, "time_series_transformer"),
)
AUTO = {causal: "AutoModelForCausalLM", "speech_to_text": "AutoModelForSpeechSeq2Seq"}
FAMILIES: dict[str, Callable[[], ModelAndInputs]] = {
    kind: Transformers(kind, inputs, AUTO.get(kind) or AUTO.get(inputs, "AutoModel"))
    for inputs, kinds in BY_INPUTS
    for kind in kinds.split()
}


def timm_model(name: str, **options: Any) -> Callable[[], ModelAndInputs]:
    """Return a maker of a timm model with an image as its input."""

    def make() -> ModelAndInputs:
        timm = import_module("timm")
        size = options.get("img_size", 64)
        return timm.create_model(name, num_classes=10, **options), {"x": torch.randn(2, 3, size, size)}

    return make


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
FAMILIES |= {
    "timm resnet": timm_model("resnet18"),
    "timm vit": timm_model("vit_tiny_patch16_224", **VIT),
    "timm deit3": timm_model("deit3_small_patch16_224", **VIT),
    "timm swin": timm_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=32, depths=(1, 1), num_heads=(2, 4)),
    "timm convnext": timm_model("convnext_atto"),
    "timm mixer": timm_model("mixer_s32_224", img_size=64),
    "timm efficientnet": timm_model("efficientnet_b0"),
    "timm densenet": timm_model("densenet121"),
    "timm regnet": timm_model("regnetx_002"),
    "timm mobilenetv3": timm_model("mobilenetv3_small_050"),
}


def with_adapters(kind: str, inputs: Callable[[], Inputs], targets: list[str]) -> Callable[[], ModelAndInputs]:
    """Return a maker of a model with peft adapters; adapters stay dense, the layers below them become sparse."""

    def make() -> ModelAndInputs:
        peft = import_module("peft")
        model, given = Transformers(kind, inputs)()
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
