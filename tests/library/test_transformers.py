"""Models of the transformers library: saved and loaded again by its own functions."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import blocksparse as bs
from blocksparse.surgery.tied import forget_ties, untie_output_layers

transformers = pytest.importorskip("transformers")

IDS = torch.arange(9)[None]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(autouse=True)
def quiet():
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.set_verbosity(level)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))  # tied


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # tied, with Conv1D


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config)


def sparse(make=bert, **options):
    return bs.sparsify(make().eval(), 0.25, force=True, scope="layer", **options)


def layouts(model):
    return {name: m.layout for name, m in model.named_modules() if isinstance(m, bs.nn.module.BlockSparseModule)}


def close(ours, theirs):
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS)[0], theirs(IDS)[0], rtol=0, atol=0)


@pytest.mark.parametrize("make", [bert, gpt2, llama, mixtral], ids=["bert", "gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("shards", ["one-file", "sharded"])
def test_round_trip(make, shards, tmp_path):
    model = sparse(make)
    model.save_pretrained(tmp_path, max_shard_size="100KB" if shards == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "sharded")
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), "nothing missing, nothing unexpected"
    assert layouts(again) == layouts(model)
    assert layouts(model)
    close(again, model)


@pytest.mark.full
def test_in_another_process_after_import_blocksparse_alone(tmp_path):
    model = sparse()
    model.save_pretrained(tmp_path)
    code = f"""
import blocksparse, sys
assert "transformers" not in sys.modules
import transformers, torch
model = transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})
print(torch.arange(9)[None].shape, sum(isinstance(m, blocksparse.nn.Linear) for m in model.modules()))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == str(len(layouts(model)))


@pytest.mark.full
def test_loading_without_blocksparse_fails(tmp_path):
    sparse().save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Unknown quantization type, got blocksparse" in ran.stdout + ran.stderr


def test_other_heads_and_dtypes(tmp_path):
    model = sparse()
    model.save_pretrained(tmp_path / "whole")
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole", add_pooling_layer=False)
    close(base, model.bert)
    base.save_pretrained(tmp_path / "base")
    headed = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "base")
    close(headed.bert, base)
    half = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert half.bert.encoder.layer[0].output.dense.values.dtype == torch.bfloat16
    assert layouts(half.float()) == layouts(model)


def test_the_current_layouts_are_saved(tmp_path):
    """Layouts that have changed, a densified model, one loaded and sparsified further."""
    model = sparse()
    layer = model.bert.encoder.layer[0].output.dense
    mask = torch.zeros(layer.layout.grid, dtype=torch.bool)
    mask[0, 0] = True
    layer.set_layout(bs.BlockLayout(mask, layer.layout.block_shape), torch.randn(1, 32, 32))
    model.save_pretrained(tmp_path / "changed")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "changed")
    assert layouts(again) == layouts(model)
    dense = bs.densify(again)
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "dense")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS)[0], model(IDS)[0])
    assert not layouts(loaded)
    again.dequantize()
    assert not layouts(again)


def test_a_layer_with_a_fused_activation_is_not_saved(tmp_path):
    model = sparse()
    model.bert.encoder.layer[0].intermediate.dense.activation = "gelu"
    with pytest.raises(bs.BlockSparseError, match=r"from_pretrained cannot load .* with an activation"):
        model.save_pretrained(tmp_path)


def test_a_dense_model_is_not_made_sparse_by_loading(tmp_path):
    from blocksparse.integrations.transformers import BlockSparseConfig

    bert().save_pretrained(tmp_path)
    with pytest.raises(bs.BlockSparseError, match=r"blocksparse\.sparsify"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path, quantization_config=BlockSparseConfig())


NAME = "bert.encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "weights by name, in version 1"),
        (lambda c: c.update(weights=[1]), "weights by name"),
        (lambda c: c.update(weights={"nothing": {}}), "names of weights of a BertForMaskedLM, got 'nothing'"),
        (lambda c: c["weights"].update({NAME: 3}), "block_size and blocks, got 3"),
        (lambda c: c["weights"][NAME].update(block_size=[0, 1]), "block_size: expected a positive int"),
        (lambda c: c["weights"][NAME].update(blocks=-1), "blocks of .*: expected an int"),
        (lambda c: c["weights"][NAME].update(blocks=10**12), "blocks of .*: expected an int"),
        (lambda c: c["weights"][NAME].update(block_size=[1 << 20, 1 << 20], blocks=1), "no more parameters than"),
        (lambda c: c["weights"][NAME].update(block_size=[10**8, 16], blocks=0), "no more parameters than"),
        (lambda c: c["weights"].update({"bert.embeddings.word_embeddings.weight": c["weights"][NAME]}), "Embedding"),
        (
            lambda c: c["weights"].pop(NAME),
            "an entry for each of the .* block-sparse weights in the checkpoint",
        ),
        (lambda c: c.update(weights={}), "weights in the checkpoint, got 0 of them"),
    ],
    ids=[
        "version",
        "list",
        "names",
        "number",
        "block",
        "negative",
        "blocks",
        "memory",
        "padding",
        "embedding",
        "missing",
        "none",
    ],
)
def test_hostile_configs_are_refused(change, message, tmp_path):
    sparse().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    with pytest.raises(bs.BlockSparseError, match=message):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("key", "new", "message"),
    [
        ("col_indices", lambda x: x + 10**6, "cols: expected indices from 0"),
        ("crow_indices", lambda x: x * 0, "crow_indices: expected"),
        ("crow_indices", None, "the checkpoint lacks crow_indices"),
        ("values", None, "the checkpoint lacks values"),
        ("bias", None, "the checkpoint lacks bias"),
    ],
    ids=["columns", "rows", "missing", "no values", "no bias"],
)
def test_hostile_indices_are_refused(key, new, message, tmp_path):
    sparse().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    name = "bert.encoder.layer.0.output.dense." + key
    state = {k: new(v) if k == name and new else v for k, v in state.items() if k != name or new}
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(bs.BlockSparseError, match=message):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
def test_load_sparsified_accepts_a_file_with_tied_weights_once(make, device, tmp_path):
    model = sparse(make)
    model.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert len(state) < len(model.state_dict())
    if device == "meta":
        with torch.device("meta"):
            dense = make()
        dense.tie_weights()
        own = make().state_dict()  # buffers that are not in the file
        for name, buffer in dense.named_buffers():
            module, _, key = name.rpartition(".")
            dense.get_submodule(module)._buffers[key] = model.get_buffer(name) if name not in own else buffer
    else:
        dense = make()
    again = bs.load_sparsified(dense.eval(), state)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    close(again, model)


def test_only_models_of_transformers_are_attached(monkeypatch):
    assert not hasattr(bs.sparsify(nn.Linear(64, 64), 0.5, force=True), "hf_quantizer")


def test_a_block_sparse_head_refuses_more_tokens_before_anything_changes():
    config = transformers.LlamaConfig(**SIZES | {"vocab_size": 48}, tie_word_embeddings=False)
    model = bs.sparsify(transformers.LlamaForCausalLM(config), 0.5, 8, force=True)
    with pytest.raises(bs.BlockSparseError, match="resize_token_embeddings: the output layer lm_head is block-sparse"):
        model.resize_token_embeddings(56)
    assert model.get_input_embeddings().weight.shape[0] == 48
    model.lm_head = bs.densify(model.lm_head)
    model.resize_token_embeddings(56)
    assert model(torch.arange(50)[None]).logits.shape == (1, 50, 56)


def t5():
    sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 64, "d_kv": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [bert, gpt2, t5])
def test_an_output_layer_that_was_untied_survives_saving_and_loading(make, tmp_path):
    model, inputs = make().eval(), {"input_ids": IDS}
    inputs |= {"decoder_input_ids": IDS} if make is t5 else {}
    untied = untie_output_layers(model)
    forget_ties(model, untied)
    model = bs.sparsify(model, 0.5, 16, force=True)
    assert untied.keys() & {"lm_head.weight", "cls.predictions.decoder.weight"}
    assert hasattr(model.get_submodule(next(iter(untied)).removesuffix(".weight")), "layout")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")
@pytest.mark.parametrize("compressed", [False, True])
def test_a_head_that_is_tied_to_the_embedding_stays_dense_and_tied(compressed, tmp_path):
    model, tokens = gpt2().eval(), torch.randint(64, (16, 8))
    data = [{"input_ids": batch} for batch in tokens.split(4)]
    if compressed:
        smaller = bs.compress(model, data, 0.5, steps=2).model
    else:
        smaller = bs.sparsify(model, 0.5, force=True, data=data)
        assert len(layouts(smaller)) == 8
    assert smaller.lm_head.weight is smaller.transformer.wte.weight
    row = next(row for row in bs.report(smaller, tokens=1).rows if row.name == "lm_head.weight")
    assert "tied to transformer.wte.weight" in row.note
    smaller.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    torch.testing.assert_close(loaded(tokens).logits, smaller(tokens).logits)
