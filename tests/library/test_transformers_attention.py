"""`attn_implementation="blocksparse"` against transformers' own attention and masks."""

from __future__ import annotations

import pytest
import torch

import blocksparse as bs

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=50)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SIZES, **TOKENS, local_attention=40)  # its second layer has a window
    ),
}


def masks(tokens):
    """Which of two sequences' tokens are padding: none, the last ones, the first ones."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    right, left = mask.clone(), mask.clone()
    right[0, tokens - 30 :] = left[0, :40] = 0
    return {"none": None, "right": right, "left": left}


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_their_own_masks(name, padding):
    model, ids, mask = MODELS[name]().eval(), torch.randint(100, (2, 130)), masks(130)[padding]
    real = slice(None) if mask is None else mask.bool()
    found = []
    for implementation in ("sdpa", "blocksparse"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask).logits[real]
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_a_cache(name):
    model, ids = MODELS[name]().eval(), torch.randint(100, (2, 70))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": masks(70)["left"]}
    found = []
    for implementation in ("sdpa", "blocksparse"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, **options))
    assert torch.equal(*found)


def test_packed_documents_begin_their_positions_again():
    model, ids = MODELS["llama"]().eval(), torch.randint(100, (1, 150))
    model.set_attn_implementation("blocksparse")
    positions = torch.cat([torch.arange(60), torch.arange(90)])[None]
    together = model(input_ids=ids, position_ids=positions).logits
    apart = [model(input_ids=part).logits for part in ids.split([60, 90], 1)]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-4, atol=1e-5)


def test_patterns_from_the_config(tmp_path):
    model, ids = MODELS["bert"]().eval(), torch.randint(100, (2, 130))
    model.config.blocksparse_attention = {"pattern": "bigbird", "block_size": 16, "random_blocks": 1}
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, attn_implementation="blocksparse").eval()
    found = model(ids).logits
    layout = bs.patterns.bigbird(144, 16, random_blocks=1)
    seen = bs.to_dense(torch.ones(layout.values_shape), layout).bool()[None, None, :130, :130]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(ids, attention_mask=seen).logits, rtol=1e-4, atol=1e-5)


def test_bad_input():
    model, ids = MODELS["llama"]().eval(), torch.randint(100, (1, 20))
    model.set_attn_implementation("blocksparse")
    with pytest.raises(bs.BlockSparseError, match=r'attention_mask: expected a mask of padding, \[batch, 20\].*"sdpa"'):
        model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))
    with pytest.raises(bs.BlockSparseError, match="needs a dynamic cache"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static", pad_token_id=0)
    for pattern, message in [
        ("bigbird", "expected a dict such as"),
        ({"pattern": "all"}, "pattern of .*'bigbird'.*'all'"),
    ]:
        model.config.blocksparse_attention = pattern
        with pytest.raises(bs.BlockSparseError, match=message):
            model(ids)
