"""The picture of the rows of `bench.gpu`: speed-ups over dense against density, from what their details say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocksparse.measure import Spread
from blocksparse.ops.linear.specs import GPU_REACH

from .report import figure_and_axes, line, plain_ticks

Details = Mapping[str, Any]

_COLOURS = ("#0072b2", "#d55e00", "#009e73")


def write_chart(path: Path, cases: Mapping[str, Details], ceilings: Details, where: str) -> None:
    """A PNG: speed-up over dense against density, few tokens and many, under what bytes and arithmetic allow.

    Args:
        cases: the details of rows, by their name in GPU_REACH.
        ceilings: those of the row of the copy and the dense peak.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    figure, (few, many) = figure_and_axes((12, 5.2), columns=2)
    forward = {name: case for name, case in cases.items() if "dense" in case.get("speedup", ())}
    for axes, title, part, key in (
        (few, "few tokens", lambda name: name.startswith("few"), lambda case: case["dtype"]),
        (many, "many tokens", lambda name: not name.startswith("few"), lambda case: f"block {case['block']}"),
    ):
        chosen = {name: case for name, case in forward.items() if part(name)}
        groups = dict.fromkeys(key(case) for case in chosen.values())
        for colour, group in zip(_COLOURS, groups, strict=False):
            some = sorted((c for c in chosen.values() if key(c) == group), key=lambda case: case["density_stored"])
            _draw(axes, some, group, colour)
        for name, case in chosen.items():
            axes.plot(
                case["density_stored"], dict(GPU_REACH[name].ratios)["dense"], marker="_", ms=14, color="0.2", ls=""
            )
        shapes = dict.fromkeys(f"hidden {c['out_features']}, {c['tokens']} tokens" for c in chosen.values())
        axes.axhline(1, color="0.2", lw=1)
        axes.set(xscale="log", yscale="log", xlabel="density (stored blocks / all blocks)", ylabel="speed-up")
        axes.set_title(f"{title}: {'; '.join(shapes)}" if shapes else f"{title}: not measured", loc="left", size=11)
        if not chosen:
            axes.set(xlim=(0.01, 1), ylim=(1, 100))
        else:
            axes.legend(frameon=False, fontsize=8.5)
        plain_ticks(axes)
        axes.grid(which="major", color="0.9", lw=0.8)
    rates = (
        f"a copy's {ceilings['copy'] / 1e12:.2f} TB/s, dense bf16 {ceilings['dense']['bfloat16'] / 1e12:.0f} TFLOP/s"
    )
    figure.supxlabel(f"over dense; dashed: the bound by {rates}; bars: targets. {where}", size=7.5, color="0.4")
    figure.savefig(path, format="png", dpi=150)


def _draw(axes: Any, cases: list[Details], name: str, colour: str) -> None:
    bounds = [case["seconds"]["dense"]["median"] / case["least_time"] for case in cases]
    axes.plot([case["density_stored"] for case in cases], bounds, "--", color=colour, lw=1)
    line(axes, [(case["density_stored"], Spread(**case["speedup"]["dense"])) for case in cases], name, colour)
    raced = [case for case in cases if "torch-bsr" in case["seconds"]]
    if raced:
        theirs = [case["seconds"]["dense"]["median"] / case["seconds"]["torch-bsr"]["median"] for case in raced]
        where = [case["density_stored"] for case in raced]
        axes.plot(where, theirs, ":", marker="s", ms=4, color=colour, label=f"torch BSR, {name}")
