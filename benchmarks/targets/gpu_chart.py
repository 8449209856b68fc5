"""Chart of the rows of `targets.gpu`: speed-ups over dense against density, drawn from their details."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocksparse.measure import Spread
from blocksparse.topology.drawings.style import COLORS, figure_and_axes
from blocksparse_lab.bench.linear_specs import GPU_REACH
from blocksparse_lab.bench.report import line, save, speedup_axes

Details = Mapping[str, Any]


def write_chart(path: Path, cases: Mapping[str, Details], ceilings: Details, where: str) -> None:
    """Write a PNG of the speed-up over dense against density, for few and many tokens, below the bounds of bytes and
    arithmetic.

    `cases` are the details of rows by their names in GPU_REACH; `ceilings` are those of the row of peak rates.
    """
    figure, panels = figure_and_axes((12, 5.2), columns=2)
    measured = {name: case for name, case in cases.items() if "dense" in case.get("speedup", ())}
    for axes, title, are_few in zip(panels, ("few tokens", "many tokens"), (True, False), strict=True):
        chosen = {name: case for name, case in measured.items() if name.startswith("few") is are_few}
        groups: dict[str, list[Details]] = {}
        for name, case in chosen.items():
            groups.setdefault(case["dtype"] if are_few else f"block {case['block']}", []).append(case)
            least = dict(GPU_REACH[name].ratios)["dense"]
            axes.plot(case["density_stored"], least, marker="_", ms=14, color="0.2", ls="")
        for colour, (group, some) in zip(COLORS, groups.items(), strict=False):
            _draw_group(axes, sorted(some, key=lambda case: case["density_stored"]), group, colour)
        shapes = dict.fromkeys(f"hidden {c['out_features']}, {c['tokens']} tokens" for c in chosen.values())
        speedup_axes(axes, f"{title}: {'; '.join(shapes) or 'not measured'}")
        if not chosen:
            axes.set(xlim=(0.01, 1), ylim=(1, 100))
        else:
            axes.legend(frameon=False, fontsize=8.5)
    copy, dense = ceilings["copy"] / 1e12, ceilings["dense"]["bfloat16"] / 1e12
    rates = f"a copy's {copy:.2f} TB/s, dense bf16 {dense:.0f} TFLOP/s"
    save(figure, path, f"over dense; dashed: the bound by {rates}; bars: targets. {where}")


def _draw_group(axes: Any, cases: list[Details], name: str, colour: str) -> None:
    """Draw one group: our speed-ups, their bound, and those of PyTorch's BSR."""
    bounds = [case["seconds"]["dense"]["median"] / case["least_time"] for case in cases]
    axes.plot([case["density_stored"] for case in cases], bounds, "--", color=colour, lw=1)
    line(axes, [(case["density_stored"], Spread(**case["speedup"]["dense"])) for case in cases], name, colour)
    raced = [case for case in cases if "torch-bsr" in case["seconds"]]
    if raced:
        theirs = [case["seconds"]["dense"]["median"] / case["seconds"]["torch-bsr"]["median"] for case in raced]
        where = [case["density_stored"] for case in raced]
        axes.plot(where, theirs, ":", marker="s", ms=4, color=colour, label=f"torch BSR, {name}")
