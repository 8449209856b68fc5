"""The directives `speed-chart`, `dots` and `kept-chart`: charts of committed results, drawn as SVG with the site.

`dots` shows one figure for several networks, with its standard deviation. It names a result as `results` does, and
either one row and several columns, or several rows and one column:

```{dots} wikipedia-small
:title: A wide sparse LSTM needs fewer bits than a dense one
:axis: bits per character, lower is better
:columns: dense | small-world | random
bits per character, held out
```

`kept-chart` shows how much of dense accuracy each way to a faster network keeps, with one line for each result of
`benchmarks/compress.py`:

```{kept-chart}
:title: What is left of the dense network's accuracy
compress-mlp | MLP
compress-vit | vision transformer
```
"""

import json
import math
import re
from html import escape
from pathlib import Path
from typing import ClassVar

import results_table
from docutils import nodes
from docutils.parsers.rst import Directive, directives

SPEEDS = Path(__file__).parents[1] / "benchmarks" / "results"
BLOCKS = 4096 * 4096 // 32**2  # of the timed layer
WIDTH, LEFT, RIGHT = 700, 215, 570  # of a chart, and of its axis where labels are on the left
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"

Points = dict[float, float]


class Chart(Directive):
    """A figure with an SVG, whose colours follow the theme (`static/site.css`)."""

    def svg(self) -> str:
        raise NotImplementedError

    def run(self):
        return [nodes.raw("", f'<figure class="chart">{self.svg()}</figure>', format="html")]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def drawing(title: str, height: float, shapes: list[str]) -> str:
    """Return an SVG with a title above the shapes."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return "".join([head, text(0, 18, title, "title"), *shapes, "</svg>"])


# -- speed -------------------------------------------------------------------------------------------------------------


def forward_speeds(machine: str) -> Points:
    """Return speed-ups of the float32 forward product by density, over MKL or oneDNN, whichever is faster at 0.1.

    MKL takes turns with our product at each density. oneDNN was timed once: its time does not depend on the density.
    """
    rows = json.loads((SPEEDS / f"linear-{machine}.json").read_text())["rows"]
    details = {row["work"]: row["details"] for row in rows}
    dense = details["fp32 forward, hidden 4096, 1024 tokens, density 0.1"]["seconds"]
    onednn = dense["onednn"]["median"] if dense["onednn"]["median"] < dense["dense"]["median"] else None
    curve = details["fp32 forward, time against nnz, density 0.02 to 0.5"]
    best = onednn or curve["dense"]["median"]
    speeds = {blocks / BLOCKS: best / ours for blocks, ours in zip(curve["nnz"], curve["seconds"], strict=True)}
    for density in (0.7, 1):
        case = details[f"break-even forward, density {density:g}, hidden 4096, 1024 tokens"]
        ours = case["seconds"]["blocksparse"]["median"]
        speeds[density] = onednn / ours if onednn else case["speedup"]["dense"]["median"]
    return speeds


def training_speeds(name: str) -> Points:
    """Return speed-ups of a training step by density, where PyTorch's dense product is oneDNN's."""
    cases = json.loads((SPEEDS / f"{name}.json").read_text())["results"]
    return {case["density"]: case["speedup"]["dense"]["median"] for case in reversed(cases)}


def speed_series() -> dict[str, Points]:
    return {
        "float32 forward, AVX2": forward_speeds("amd-epyc-avx2"),
        "float32 forward, AVX-512": forward_speeds("amd-epyc-avx512_bf16"),
        "bfloat16 training step, AVX-512": training_speeds("linear-train-bfloat16-h4096-b32-t1024"),
    }


def gpu_speeds(words: str) -> Points:
    """Return speed-ups on the H100 by density, of the rows whose work matches a regular expression."""
    rows = json.loads((SPEEDS / "linear-nvidia-h100-80gb-hbm3.json").read_text())["rows"]
    cases = [row["details"] for row in rows if re.match(words, row["work"]) and "speedup" in row["details"]]
    speeds = {case["density"]: case["speedup"]["dense"]["median"] for case in cases}
    return dict(sorted(speeds.items()))


def curves(title: str, series: dict[str, Points], places: list[tuple[float, float]], highest: float) -> str:
    """Draw speed-ups against density on logarithmic axes; the places of the names are densities and speed-ups."""
    left, right, top, bottom = 60.0, 660.0, 50.0, 360.0

    def x(density: float) -> float:
        return left + (right - left) * math.log(density / 0.018) / math.log(1 / 0.018)

    def y(speed: float) -> float:
        return bottom - (bottom - top) * math.log(speed / 0.5) / math.log(highest / 0.5)

    shapes = [text(0, 38, "times as fast as dense", "note")]
    for speed in (1, 2, 5, 10, 20):
        shapes.append(line(left, y(speed), right, y(speed), "even" if speed == 1 else "grid"))
        shapes.append(text(left - 8, y(speed) + 5, f"{speed}", "note", "end"))
    for density in (0.02, 0.05, 0.1, 0.2, 0.5, 1):
        shapes.append(text(x(density), bottom + 18, f"{density:g}", "note", "middle"))
    shapes.append(text(360, bottom + 40, "density (fraction of the blocks that is stored)", "note", "middle"))
    shapes.append(text(x(0.02), y(1) - 6, "as fast as dense", "note"))
    for nth, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x(density):.1f},{y(speed):.1f}" for density, speed in points.items())
        shapes.append(f'<polyline points="{path}" class="s{nth}"/>')
        shapes += [f'<circle cx="{x(d):.1f}" cy="{y(s):.1f}" r="4" class="s{nth}"/>' for d, s in points.items()]
        shapes.append(text(x(places[nth][0]), y(places[nth][1]), name, f"name s{nth}"))
    if all(1 in points for points in series.values()):
        full = sorted(points[1] for points in series.values())
        shapes.append(text(right, y(full[0]) + 22, f"density 1: {full[0]:.2f} to {full[-1]:.2f}", "note", "end"))
    return drawing(title, bottom + 50, shapes)


class SpeedChart(Chart):
    """Speed-up of a linear layer against density, over the best dense product: of CPUs, or with "gpu" of an H100."""

    optional_arguments = 1

    def svg(self) -> str:
        if self.arguments:
            series = {
                "bfloat16, 32 tokens": gpu_speeds("few tokens, bf16, density"),
                "bfloat16, 8,192 tokens": gpu_speeds("(many tokens|break-even), block 128, density"),
                "float32, 32 tokens": gpu_speeds("few tokens, fp32, density"),
            }
            title = "On an H100, few tokens gain most, in float32 up to 30 times"
            return curves(title, series, [(0.019, 7), (0.1, 1.8), (0.055, 24)], 40)
        series = speed_series()
        tenth = sorted(min(points.items(), key=lambda one: abs(one[0] - 0.1))[1] for points in series.values())
        title = f"At density 0.1, large layers run {tenth[0]:.1f} to {tenth[-1]:.1f} times as fast as dense ones"
        return curves(title, series, [(0.024, 28), (0.056, 16), (0.02, 4.9)], 40)


# -- dots --------------------------------------------------------------------------------------------------------------


def dots(head: list[str], *lines: list[str]) -> list[tuple[str, float, float]]:
    """Return label, mean and deviation of each cell of a row, or of each row of a column.

    >>> dots(["", "dense", "set"], ["error, %", "10.61 ± 0.09", "11"])
    [('dense', 10.61, 0.09), ('set', 11.0, 0.0)]
    """
    cells = zip(head[1:], lines[0][1:], strict=True) if len(lines) == 1 else ((line[0], line[1]) for line in lines)
    found = []
    for label, cell in cells:
        mean, *deviation = (float(number.replace(",", "")) for number in re.findall(NUMBER, cell.partition(" (")[0]))
        found.append((label, mean, deviation[0] if deviation else 0.0))
    return found


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from low to high.

    >>> ticks(9.9, 12.8)
    [10.0, 11.0, 12.0]
    """
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 5, 10) if one * power >= rough)
    return [round(nth * step, 10) for nth in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Dots(Chart):
    required_arguments = 1
    has_content = True
    option_spec: ClassVar = dict.fromkeys(("title", "axis", "columns", "names", "digits"), directives.unchanged)

    def svg(self) -> str:
        columns = self.options["columns"].split(" | ") if "columns" in self.options else []
        points = dots(*results_table.select(self.arguments[0], list(self.content), columns))
        names = self.options["names"].split(" | ") if "names" in self.options else [name for name, *_ in points]
        ends = [mean + sign * deviation for _, mean, deviation in points for sign in (-1, 1)]
        margin = 0.08 * (max(ends) - min(ends))
        low, high = min(ends) - margin, max(ends) + margin

        def x(value: float) -> float:
            return LEFT + (RIGHT - LEFT) * (value - low) / (high - low)

        bottom = 40.0 + 30 * len(points)
        digits = int(self.options.get("digits", 2))
        shapes = []
        for at in ticks(low, high):
            shapes += [line(x(at), 34, x(at), bottom, "grid"), text(x(at), bottom + 18, f"{at:g}", "note", "middle")]
        shapes.append(text((LEFT + RIGHT) / 2, bottom + 40, self.options["axis"], "note", "middle"))
        for nth, (name, (_, mean, deviation)) in enumerate(zip(names, points, strict=True)):
            y, kind = 54 + 30 * nth, "s0" if name.startswith("dense") else "s1"
            label = f"{mean:.{digits}f}" + f" ± {deviation:.{digits}f}" * (deviation > 0)
            shapes += [text(LEFT - 12, y + 5, name, f"name {kind}", "end"), text(RIGHT + 12, y + 5, label)]
            shapes.append(line(x(mean - deviation), y, x(mean + deviation), y, f"bar {kind}"))
            shapes.append(f'<circle cx="{x(mean):.1f}" cy="{y}" r="6" class="{kind}"/>')
        return drawing(self.options["title"], bottom + 50, shapes)


# -- accuracy after compression ----------------------------------------------------------------------------------------


class KeptChart(Chart):
    """Mean accuracy of each way as a percentage of the dense network's; for bits, dense bits over the way's."""

    WAYS: ClassVar = {"compress": "s1", "smaller dense": "s0", "gradual": "s2", "scratch": "s3"}
    NAMES: ClassVar = {"smaller dense": "smaller dense net", "gradual": "gradual pruning", "scratch": "from scratch"}
    LOWEST, HIGHEST = 40.0, 104.0  # others are drawn at these ends

    has_content = True
    option_spec: ClassVar = {"title": directives.unchanged}

    def svg(self) -> str:
        rows = [[part.strip() for part in each.split("|")] for each in self.content]
        bottom = 70.0 + 32 * len(rows)
        low, high, ends = self.LOWEST, self.HIGHEST, (LEFT, WIDTH - 70)

        def x(value: float) -> float:
            return ends[0] + (ends[1] - ends[0]) * (min(max(value, low), high) - low) / (high - low)

        shapes, at = [text(WIDTH, 43, "speed-up", "note", "end")], 150.0
        for way, kind in self.WAYS.items():
            name = self.NAMES.get(way, way)
            shapes += [f'<circle cx="{at:.1f}" cy="38" r="5" class="{kind}"/>', text(at + 9, 43, name, "note")]
            at += 7.2 * len(name) + 26
        for tick in range(int(low), 101, 10):
            shapes.append(line(x(tick), 56, x(tick), bottom, "even" if tick == 100 else "grid"))
            shapes.append(text(x(tick), bottom + 18, f"{tick}", "note", "middle"))
        axis = "percent of the dense network's accuracy (for text, dense bits / bits)"
        shapes.append(text((ends[0] + ends[1]) / 2, bottom + 40, axis, "note", "middle"))
        for nth, (result, name) in enumerate(rows):
            y, kept, speed = 78 + 32 * nth, *kept_accuracy(result)
            shapes += [text(LEFT - 12, y + 5, name, "name", "end"), text(WIDTH, y + 5, f"{speed:.2g}x", "", "end")]
            for way in reversed(self.WAYS):  # compress is drawn last
                if way in kept:
                    radius = 7 if way == "compress" else 5
                    shapes.append(f'<circle cx="{x(kept[way]):.1f}" cy="{y}" r="{radius}" class="{self.WAYS[way]}"/>')
        return drawing(self.options["title"], bottom + 50, shapes)


def kept_accuracy(name: str) -> tuple[dict[str, float], float]:
    """Return the percentage of dense accuracy that each way keeps, and how many times as fast `compress` gets.

    >>> kept, speed = kept_accuracy("compress-mlp")
    >>> 98 < kept["compress"] < 100, speed > 5
    (True, True)
    """
    result = json.loads((SPEEDS / f"{name}.json").read_text())
    of, dense, in_bits = result["outcomes"], result["dense"], "bits" in result["unit"]
    means = {}
    for way in set(of["way"]):
        metrics = [metric for each, metric in zip(of["way"], of["metric"], strict=True) if each == way]
        mean = sum(metrics) / len(metrics)
        means[way] = 100 * (dense / mean if in_bits else mean / dense)
    speeds = [speed for each, speed in zip(of["way"], of["speedup"], strict=True) if each == "compress"]
    return means, sum(speeds) / len(speeds)


def setup(app):
    app.add_directive("kept-chart", KeptChart)
    app.add_directive("speed-chart", SpeedChart)
    app.add_directive("dots", Dots)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
