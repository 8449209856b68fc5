"""Export a block-sparse model: for ONNX runtimes, and for AOT-Inductor in Python and C++.

- ONNX: a Gather and a MatMul for each class of rows of blocks. Any ONNX runtime loads it. Without sparse="gather" the
  weights are dense, with zeros in place of missing blocks.
- AOT-Inductor of the block-sparse model: full speed, but only in Python programs that import blocksparse first. The
  ops are registered from Python; C++ does not find them ("Could not find schema for blocksparse::linear").
- AOT-Inductor of the densified model: contains no op of this library. C++ loads it with libtorch alone:
  `torch::inductor::AOTIModelPackageLoader("dense.pt2").run({x})`.

Run: pip install onnx onnxscript onnxruntime; python examples/deployment.py [folder]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import blocksparse as bs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
model = bs.sparsify(model, density=0.25, force=True)
x = torch.randn(8, 256)

batch = ({0: "batch"},)
file = bs.export_onnx(model, x, folder / "model.onnx", dynamic_shapes=batch, sparse="gather")  # checked
print(f"wrote {file}")
with torch.no_grad():
    for name, net in (("sparse", model), ("dense", bs.densify(model))):
        exported = torch.export.export(net, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / f"{name}.pt2"))
        error = (torch._inductor.aoti_load_package(package)(x) - model(x)).abs().max()
        print(f"wrote {package}, largest difference {error:.1g}")
