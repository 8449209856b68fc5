"""A block-sparse model in a file: for ONNX runtimes, and for AOT-Inductor in Python and C++.

- ONNX: dense, with zeros where no block was; any ONNX runtime takes it.
- AOT-Inductor of the block-sparse model: as fast as it is here, but only for Python programs that have imported
  blocksparse before they load it. The operators are registered from Python; C++ alone does not find them ("Could not
  find schema for blocksparse::linear").
- AOT-Inductor of the densified model: has no operator of ours. C++ loads it with libtorch alone:
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

file = bs.export_onnx(model, x, folder / "model.onnx", dynamic_shapes=({0: "batch"},))  # compared with onnxruntime
print(f"wrote {file}")
with torch.no_grad():
    for name, net in (("sparse", model), ("dense", bs.densify(model))):
        exported = torch.export.export(net, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / f"{name}.pt2"))
        error = (torch._inductor.aoti_load_package(package)(x) - model(x)).abs().max()
        print(f"wrote {package}, which differs by {error:.1g}")
