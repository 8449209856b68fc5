"""Recognizes the mixtures of experts of the transformers library that `blocksparse.nn.Experts` can replace."""

from __future__ import annotations

from functools import cache
from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..nn.experts import Experts

# Classes of transformers 5.23 that compute what MixtralExperts does, by the folder of their model.
KNOWN_EXPERTS = frozenset(
    """
    afmoe.AfmoeExperts axk1.AXK1Experts axk2.AXK2Experts bailing_hybrid.BailingHybridExperts
    cohere2_moe.Cohere2MoeExperts deepseek_ocr2.DeepseekOcr2TextExperts deepseek_v2.DeepseekV2Experts
    deepseek_v3.DeepseekV3Experts deepseek_v32.DeepseekV32Experts diffusion_gemma.DiffusionGemmaTextExperts
    dots1.Dots1Experts dots3_note.Dots3NoteExperts ernie4_5_moe.Ernie4_5_MoeExperts
    ernie4_5_vl_moe.Ernie4_5_VLMoeMoeExperts exaone_moe.ExaoneMoeExperts flex_olmo.FlexOlmoExperts
    flint.FlintExperts gemma4.Gemma4TextExperts glm4_moe.Glm4MoeExperts glm4_moe_lite.Glm4MoeLiteExperts
    glm4v_moe.Glm4vMoeTextExperts glm_moe_dsa.GlmMoeDsaExperts granitemoe.GraniteMoeExperts
    granitemoe_swa.GraniteMoeSWAExperts granitemoehybrid.GraniteMoeHybridExperts
    granitemoeshared.GraniteMoeSharedExperts hunyuan_v1_moe.HunYuanMoEV1Experts hy_v3.HYV3Experts
    inkling.InklingExperts jamba.JambaExperts kimi_linear.KimiLinearExperts kolibri1.Kolibri1Experts
    laguna.LagunaExperts lfm2_moe.Lfm2MoeExperts mellum.MellumExperts mimo_v2_flash.MiMoV2FlashExperts
    minimax.MiniMaxExperts minimax_m2.MiniMaxM2Experts mistral4.Mistral4Experts
    mistral_large4.MistralLarge4TextExperts mixtral.MixtralExperts olmoe.OlmoeExperts phimoe.PhimoeExperts
    qwen2_moe.Qwen2MoeExperts qwen3_5_moe.Qwen3_5MoeExperts qwen3_moe.Qwen3MoeExperts
    qwen3_next.Qwen3NextExperts qwen3_omni_moe.Qwen3OmniMoeThinkerTextExperts
    qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts qwen3_vl_moe.Qwen3VLMoeTextExperts
    qwen4_exp.Qwen4ExpTextExperts solar_open.SolarOpenExperts unlimited_ocr.UnlimitedOcrTextExperts
    zaya.ZayaExperts
    """.split()  # noqa: SIM905
)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module stacks the weights of its experts and computes what MixtralExperts does."""
    kind: Any = type(module)
    if not kind.__module__.startswith("transformers.models.") or "gate_up_proj" not in module._parameters:
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    stacked = all(weight is not None and weight.dim() == 3 and weight.is_contiguous() for weight in weights)
    if not stacked or len(module._parameters) != 2:
        return False
    return f"{kind.__module__.split('.')[2]}.{kind.__name__}" in KNOWN_EXPERTS and _computes_what_ours_do(kind)


@cache
@torch.no_grad()
def _computes_what_ours_do(kind: Any) -> bool:
    """Compare the eager forward of a class in the installed version with `Experts` on random numbers."""
    with torch.device("cpu"), torch.random.fork_rng([]):
        ours = Experts(3, 4, 5, F.silu, dtype=torch.float64)
        theirs = kind.__new__(kind)
        nn.Module.__init__(theirs)
        for name, parameter in ours.named_parameters():
            setattr(theirs, name, parameter)
        theirs.num_experts, theirs.hidden_dim, theirs.intermediate_dim, theirs.act_fn = 3, 4, 5, F.silu
        # Large inputs show activations that are clamped.
        x, index = 50 * torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6, 2))
        weights = torch.rand(6, 2, dtype=torch.float64)
        try:  # the forward below the wrapper that chooses between implementations
            y = unwrap(kind.forward)(theirs, x, index, weights)
        except Exception:  # another version's class may need anything
            return False
        return torch.allclose(ours(x, index, weights), y, rtol=1e-9, atol=1e-9)
