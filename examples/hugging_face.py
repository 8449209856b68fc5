"""Make a model of transformers block-sparse, train it while its pattern evolves, save it, and load it again.

The saved folder is complete, and `model.push_to_hub` works. To load it, import blocksparse and call `from_pretrained`.

Run: pip install transformers accelerate; python examples/hugging_face.py [folder] [steps]
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import blocksparse as bs
from blocksparse.integrations.transformers import SparsityCallback

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
model = bs.sparsify(model, density=0.25, scope="layer", skip="lm_head", force=True)

texts = torch.arange(33).repeat(64, 1) + torch.randint(32, (64, 1))  # each text counts up from a random number
data = [{"input_ids": row, "labels": row} for row in texts]
settings = TrainingArguments(folder, max_steps=steps, learning_rate=3e-3, save_strategy="no", report_to=[])
evolve = SparsityCallback(lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=20))
trained = Trainer(model, settings, train_dataset=data, callbacks=[evolve]).train()

model.eval().save_pretrained(folder)
again = AutoModelForCausalLM.from_pretrained(folder)
same = torch.equal(again(texts[:2]).logits, model(texts[:2]).logits)
print(f"mean loss {trained.training_loss:.2f}; the loaded model is equal: {same}")
