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


def test_encoder_whose_window_is_a_distance():
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
    encoder, decoder = (transformers.T5GemmaModuleConfig(**sizes) for _ in range(2))
    config = transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=50)
    model = transformers.T5GemmaModel(config).eval()
    ids = {"input_ids": torch.randint(1, 50, (2, 100)), "decoder_input_ids": torch.randint(1, 50, (2, 40))}
    found = []
    for implementation in ("eager", "blocksparse"):
        model.set_attn_implementation(implementation)
        result = model(**ids)
        found.append((result.encoder_last_hidden_state, result.last_hidden_state))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_layouts_in_use_are_not_dropped(monkeypatch):
    from blocksparse.integrations import attention as integration

    for name in ("_layouts", "_last_use"):
        monkeypatch.setattr(integration, name, {})
    used = integration._store_layout(None, 64, 7, 0)
    for block in range(1, 2 * integration.MOST_LAYOUTS):
        integration._store_layout({"block_size": block}, 64, 7, 0)
        assert integration._store_layout(None, 64, 7, 0) == used
        assert used in integration._layouts
        assert len(integration._layouts) <= integration.MOST_LAYOUTS
        assert integration._last_use.keys() == integration._layouts.keys()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_a_cache(name):
    model, ids = MODELS[name]().eval(), torch.randint(100, (2, 70))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": masks(70)["left"]}
    found = []
    for implementation in ("sdpa", "blocksparse"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, **options))
    assert torch.equal(*found)


CACHED = {
    "mistral": MODELS["mistral"],
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES,
            **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 50, "pad_token_id": 0},
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 49, 50, 70])
@pytest.mark.parametrize("name", CACHED)
def test_static_caches_are_refused_while_they_have_unused_keys(name, tokens, padded):
    """Mistral's layers all have windows, so their caches are full as soon as the prompt fills the window."""
    model, ids = CACHED[name]().eval(), torch.randint(3, 100, (2, tokens))
    mask = torch.ones_like(ids)
    mask[0, : tokens // 2] = not padded
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    dynamic = model.generate(ids, **options)
    model.set_attn_implementation("blocksparse")
    assert torch.equal(model.generate(ids, **options), dynamic)
    options["cache_implementation"] = "static"
    if name == "mistral" and tokens >= 50:
        assert torch.equal(model.generate(ids, **options), dynamic)
    else:
        with pytest.raises(bs.BlockSparseError, match=r"needs a dynamic cache.*Omit cache_implementation"):
            model.generate(ids, **options)


def test_cross_attention_with_more_keys_than_queries():
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model, ids = transformers.BartForConditionalGeneration(config).eval(), torch.randint(3, 50, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    found = []
    for implementation in ("eager", "blocksparse"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, num_beams=1))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by Dynamo, after a graph break of the model
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("borders", [[[0, 60]], [[0, 60], [0, 20, 90]]])
def test_packed_documents_begin_their_positions_again(borders, compiled):
    model, ids = MODELS["mistral"]().eval(), torch.randint(100, (len(borders), 150))
    positions = torch.stack([torch.cat([torch.arange(n) for n in _lengths(each)]) for each in borders])
    apart = [
        model(part).logits
        for row, each in zip(ids, borders, strict=True)
        for part in row[None].split(_lengths(each), 1)
    ]
    model.set_attn_implementation("blocksparse")
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for mask in (None, torch.ones_like(ids)):
        together = run(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(together.flatten(0, 1), torch.cat(apart, 1)[0], rtol=1e-4, atol=1e-5)


def _lengths(borders):
    return torch.tensor([*borders, 150]).diff().tolist()


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_that_skip_numbers_equal_eager_attention(masked, use_cache):
    """Without a mask and a cache, transformers begins a document after a skip; otherwise it does not."""
    model, ids = MODELS["mistral"]().eval(), torch.randint(100, (2, 80))
    skip = torch.cat([torch.arange(30), torch.arange(140, 190)])
    options = {"position_ids": torch.stack([skip, torch.arange(80)]), "use_cache": use_cache}
    options["attention_mask"] = torch.ones_like(ids) if masked else None
    found = []
    for implementation in ("eager", "blocksparse"):
        model.set_attn_implementation(implementation)
        found.append(model(ids, **options).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    compiled = torch.compile(model, backend="eager")(ids, **options).logits
    torch.testing.assert_close(compiled, found[0], rtol=1e-4, atol=1e-5)


def test_compiled_models_serve_several_lengths():
    model = MODELS["mistral"]().eval()
    model.set_attn_implementation("blocksparse")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for tokens in (60, 70, 130, 70):
        ids = torch.randint(100, (1, tokens))
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_chunks_shorter_than_the_input_are_refused():
    from transformers.masking_utils import create_chunked_causal_mask

    config = transformers.LlamaConfig(**SIZES)
    config.attention_chunk_size, config._attn_implementation = 16, "blocksparse"
    options = {"config": config, "attention_mask": None, "past_key_values": None}
    assert create_chunked_causal_mask(inputs_embeds=torch.ones(1, 16, 8), **options) is None
    with pytest.raises(bs.BlockSparseError, match='no mask functions of its own: use "sdpa"'):
        create_chunked_causal_mask(inputs_embeds=torch.ones(1, 17, 8), **options)


def test_images_whose_tokens_see_each_other_are_refused():
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "blocksparse"
    options = {"config": config, "inputs_embeds": torch.ones(1, 6, 8), "attention_mask": None, "past_key_values": None}
    text, image = torch.full((1, 6), -1), torch.tensor([[-1, 0, 0, 0, -1, -1]])
    assert create_causal_mask(**options, block_sequence_ids=text) is None
    with pytest.raises(bs.BlockSparseError, match='no later keys for tokens of images: use "sdpa"'):
        create_causal_mask(**options, block_sequence_ids=image)


def test_documents_with_padding_on_either_side():
    model, ids = MODELS["llama"]().eval(), torch.randint(100, (2, 60))
    positions = torch.cat([torch.arange(25), torch.arange(35)]).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :10] = mask[1, 50:] = 0
    apart = [model(ids[0, None, 10:25], position_ids=positions[:1, 10:25]), model(ids[1, None, 25:50])]
    model.set_attn_implementation("blocksparse")
    found = model(ids, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(found[0, 10:25], apart[0].logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1, 25:50], apart[1].logits[0], rtol=1e-4, atol=1e-5)


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
    hole = torch.ones_like(ids)
    hole[0, 5:10] = 0
    with pytest.raises(bs.BlockSparseError, match=r'attention_mask: expected no 0 between.*use "sdpa"'):
        model(ids, attention_mask=hole)
    with pytest.raises(bs.BlockSparseError, match="needs a dynamic cache"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static", pad_token_id=0)
    for pattern, message in [
        ("bigbird", "expected a dict such as"),
        ({"pattern": "all"}, "pattern of .*'bigbird'.*'all'"),
        ({"pattern": ["bigbird"]}, "pattern of .*'bigbird'"),
        ({"window": 3}, r"expected 'pattern', one of .*, got \{'window': 3\}"),
        ({"pattern": "sliding_window"}, r"expected the arguments of .*: window \(required\), block_size, .*, got \{\}"),
        ({"pattern": "bigbird", "neighbours": 2}, r"arguments of patterns\.bigbird: .*neighbors.*'neighbours'"),
        ({"pattern": "dilated", "tokens": 64}, r"arguments of patterns\.dilated: "),
        ({"pattern": "sliding_window", "window": {1: 2}}, "window: expected"),
        *(({"block_size": size}, "block_size of .*: expected an int, 1 or more") for size in (0, "16", (16, 16), None)),
    ]:
        model.config.blocksparse_attention = pattern
        with pytest.raises(bs.BlockSparseError, match=message):
            model(ids)
