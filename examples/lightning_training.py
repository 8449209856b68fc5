"""Prune the dense layers of a Lightning module to block-sparse ones during training.

Run: pip install lightning; python examples/lightning_training.py [steps]
"""

import sys

import lightning
import torch
from torch import nn

import blocksparse as bs
from blocksparse.integrations.lightning import SparsityCallback

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
torch.manual_seed(0)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x = torch.randn(4096, 64)
y = x[:, :8].abs().sum(1) - 6
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
model = Regression()
prune = SparsityCallback(
    lambda model, optimizer: bs.sparsity.GradualPruning(model, optimizer, density=0.2, end=steps // 2, every=5)
)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
lightning.Trainer(max_steps=steps, callbacks=[prune], **quiet).fit(model, loader)
with torch.no_grad():
    error = nn.functional.mse_loss(model.net(x).squeeze(1), y)
print(model.net, f"error {error:.3f} of {y.var():.3f}", sep="\n")
