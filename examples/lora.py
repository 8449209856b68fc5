"""Train LoRA adapters of peft on block-sparse layers: python examples/lora.py

peft knows the layers of torch.nn. For other layers it needs a table, here with its linear layer. The block-sparse base
is not trained, and the adapters are dense. Densify the model before you merge them, because the sum is dense.
"""

import peft
import torch
from peft.tuners.lora import Linear as LoraLinear

import blocksparse as bs

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
model = bs.sparsify(model, density=0.25, force=True)

config = peft.LoraConfig(r=8, target_modules=["0", "2"])
config._register_custom_module({bs.nn.Linear: LoraLinear})
model = peft.get_peft_model(model, config)
model.print_trainable_parameters()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
x, target = torch.randn(512, 256), torch.randn(512, 64)
for step in range(41):
    loss = (model(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss:.4f}")

expected = model(x)
merged = bs.densify(model).merge_and_unload()
print(f"merged: {type(merged[0]).__name__}, error {(merged(x) - expected).abs().max():.1e}")
