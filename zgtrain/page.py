"""The page of a trained student as HTML: tiles, tables, plots; nothing is fetched when it is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from zgtrain.plots import Line, plot

STYLE: Final = """
:root{--ink:#1d2430;--soft:#5f6b7a;--line:#e3e7ec;--card:#fff;--ground:#f6f7f9;--good:#1a7f4b;--bad:#c2362b}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 28px 60px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}h2{font-size:17px;margin:0 0 12px}
h3{font-size:13px;margin:0 0 6px;color:var(--soft);font-weight:600}p{margin:0 0 10px}.soft{color:var(--soft)}
table+p{margin-top:12px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 22px;
margin-top:18px;overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin-top:20px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:19px;font-weight:600;letter-spacing:-.01em}.tile span{color:var(--soft);font-size:13px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:22px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:left;font-size:13px}
th,td{padding:5px 16px 5px 0;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right}td.n{white-space:nowrap}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,monospace;word-break:break-all}
.pass,.fail{font-weight:600}.pass{color:var(--good)}.fail{color:var(--bad)}
svg{width:100%;height:auto;display:block}
blockquote{max-height:150px;overflow:auto;
margin:0 0 12px;padding:0 0 0 12px;border-left:3px solid var(--line);white-space:pre-wrap;font-size:13.5px}
"""

# What a reader who knows none of this needs for each table and plot; HTML.
SAID: Final = {
    "gates": """Are all numbers finite? Has every block learned? How much worse than the teacher's is the cross entropy
        (CE) of text that nobody trained on? Does the student use its context, does it repeat itself, does it write what
        the teacher finds likely? A gate is passed if all of its measures are. Losses are in nats per token.""",
    "training": """Block b learns to make the states h<sub>b+1</sub> of boundary b + 1 from those of boundary b, apart
        from all others. In the table: mean losses of the first and the last 32 steps, the residual error of the last
        32, what was read from the store, and what was counted in the block's own process.""",
    "loss": "How far what a block gives is from the teacher's states, by the loss that it minimises: lower is better.",
    "residual": """Σ‖error‖² over Σ‖h<sub>b+1</sub> − h<sub>b</sub>‖²: 1 is as bad as passing the input through, 0 is
        the teacher's states.""",
    "boundaries": """The price of composition. A block has learned on the teacher's states h; in the student it is fed
        what the blocks before it make of the text, ĥ. In the table: the error of what a block gives when it is fed the
        teacher's states (fit), then in the student. A cosine of 1 is the right direction, a norm error of 0 the right
        length.""",
    "depth": """Squared error over the squared size of the teacher's states. The gap between the lines is what the
        blocks before have left.""",
    "sweep": """What comes out in the end if block b is fed α h + (1 − α) ĥ, and the blocks after it what it gives: the
        more a line falls to the right, the more the errors of the blocks before b cost.""",
    "economics": """T(K) is what one of K trainings costs with its share of the cache: (cache + K runs) / K. A live run
        has its targets from the teacher, which computes them anew; from the K where T(K) is below it, the cache has
        paid.""",
    "wall": "Of the slowest block, each on a device of its own.",
    "device": "Of all blocks together.",
    "generations": "What each writes after a prompt if it always takes the likeliest token.",
    "pins": "What all this was made of. Equal digests are equal content: so anybody can see that it is the same.",
}


def page(value: Mapping[str, Any]) -> str:
    """The HTML of what `gathered` gives."""
    name, snapshot = escape(value["name"]), escape(value["blocks"][0]["report"]["snapshot"])
    body = [
        f"<h1>{name}</h1>",
        f"<p class=soft>{_how_many(value)}, each trained alone on the snapshot <code>{snapshot}</code></p>",
        _tiles(value),
        _gates(value["evaluation"], value["not_evaluated"]),
        _training(value["blocks"]),
        _boundaries(value["evaluation"]),
        _economics(value["economics"]),
        _generations(value["evaluation"]),
        _pins(value),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style><main>{''.join(body)}</main></html>\n"
    )


def _how_many(value: Mapping[str, Any]) -> str:
    trained, blocks = len(value["blocks"]), value["blocks_in_all"]
    return f"{blocks} blocks" if trained == blocks else f"{trained} of {blocks} blocks: the others are not trained yet"


# ---- sections ----


def _tiles(value: Mapping[str, Any]) -> str:
    reports, judged = [each["report"] for each in value["blocks"]], value["evaluation"]
    tiles = []
    if judged:
        passed = sum(gate["passes"] for gate in judged["gates"])
        tiles = [
            ("held-out CE, student", number(judged["student"]["ce"])),
            ("held-out CE, teacher", number(judged["teacher"]["ce"])),
            ("gates passed", f"{passed} of {len(judged['gates'])}"),
            ("parameters", f"{count(judged['parameters']['student'])} of {count(judged['parameters']['teacher'])}"),
        ]
    tiles += [
        ("critical path: the slowest block", seconds(max(each["seconds"]["total"] for each in reports))),
        ("peak memory of a block", size(max(each["peak_memory_bytes"] for each in reports))),
        ("gradient between blocks", size(max(each["inter_block_gradient_bytes"] for each in reports))),
    ]
    inner = "".join(f"<div class=tile><b>{escape(text)}</b><span>{escape(name)}</span></div>" for name, text in tiles)
    return f"<div class=tiles>{inner}</div>"


def _gates(judged: Mapping[str, Any] | None, lacking: tuple[str, str] | None) -> str:
    if judged is None:
        why, command = lacking or ("Not evaluated yet", "zgtrain evaluate JOB")
        return _section("Gates", f"<p class=soft>{why}: <code>{escape(command)}</code>.</p>")
    rows = [
        [
            escape(gate["name"]) if not at else "", escape(each["name"]), _n(number(each["number"])),
            f"{each['relation']} {number(each['threshold'])}",
            "<span class=pass>passes</span>" if each["passes"] else "<span class=fail>fails</span>",
        ]
        for gate in judged["gates"]
        for at, each in enumerate(gate["measures"])
    ]  # fmt: skip
    tokens = f"{judged['tokens']:,} scored tokens"
    about = _soft(SAID["gates"]) + _soft(f"{judged['rows']} held-out rows, {tokens}.")
    return _section("Gates", about + table(["gate", "measure", "#number", "threshold", "verdict"], rows))


def _training(blocks: Sequence[Mapping[str, Any]]) -> str:
    curves, residuals = (
        [Line(f"block {each['report']['block']}", _smooth(_series(each["log"], name))) for each in blocks]
        for name in ("boundary_loss", "residual_error")
    )
    rows = [
        [
            str(r["block"]), _n(f"{r['trained_parameters']:,}"), _n(str(r["steps"])),
            *(_n(number(r[name])) for name in ("first_window_mean_loss", "last_window_mean_loss", "residual_error")),
            _n(seconds(r["seconds"]["total"])), _n(size(r["bytes_read"])), _n(size(r["peak_memory_bytes"])),
            _n(str(r["live_teacher_parameters"])),
        ]
        for r in (each["report"] for each in blocks)
    ]  # fmt: skip
    heads = [
        "block", "#parameters", "#steps", "#loss, first 32", "#loss, last 32", "#residual error", "#time", "#read",
        "#peak memory", "#teacher parameters alive",
    ]  # fmt: skip
    plots = _pair(
        ("boundary loss", plot(curves, x="step", y="loss", log_y=True), "loss"),
        ("residual error", plot(residuals, x="step", y="residual error", log_y=True), "residual"),
    )
    return _section("Training", _soft(SAID["training"]) + plots + table(heads, rows))


def _boundaries(judged: Mapping[str, Any] | None) -> str:
    if judged is None or not judged["boundaries"]:
        return ""
    ends = judged["boundaries"]
    fits = [each["teacher_input_fit"] for each in ends]
    left = [ends[0]["assembled_predecessor_error"], *(each["assembled_output_error"] for each in ends)]
    depth = [
        Line("fed the teacher's states", [(b + 1, each["relative_mse"]) for b, each in enumerate(fits)], dots=True),
        Line("in the student", [(b, each["relative_mse"]) for b, each in enumerate(left)], dots=True),
    ]
    rows = [
        [
            str(b), f"<code>{escape(ends[b]['target'])}</code>",
            *(_n(number(fit[name])) for name in ("relative_mse", "residual_error", "cosine")),
            *(_n(number(left[b + 1][name])) for name in ("relative_mse", "cosine", "norm_error")),
        ]
        for b, fit in enumerate(fits)
    ]  # fmt: skip
    heads = [
        "block",
        "into",
        "#fit: relative MSE",
        "#residual error",
        "#cosine",
        "#in the student",
        "#cosine",
        "#norm error",
    ]
    scores = "ce" if all(row["ce"] is not None for row in judged["sweep"]) else "mse"
    sweep = [
        Line(f"block {b}", [(row["alpha"], row[scores]) for row in judged["sweep"] if row["block"] == b], dots=True)
        for b in range(len(ends))
    ]
    about = _soft(SAID["boundaries"]) + _soft(f"Over {judged['sweep_rows']} held-out rows.")
    title = "final CE by α" if scores == "ce" else "boundary MSE by α"
    plots = _pair(
        ("relative error by depth", plot(depth, x="boundary", y="relative MSE", whole_x=True), "depth"),
        (title, plot(sweep, x="α (1: the teacher's states)", y=scores.upper()), "sweep"),
    )
    return _section("Boundaries", about + plots + table(heads, rows))


def _economics(costs: Mapping[str, Any]) -> str:
    if "missing" in costs:
        return _section("Economics", f"<p class=soft>{escape(costs['missing'])}.</p>")
    plots, rows = [], []
    for kind in ("wall", "device"):
        curve = costs["all"][kind]
        lines = [Line("T(K), cached", [(each["k"], each["seconds"]) for each in curve["t"]], dots=True)]
        if curve["live_mean"] is not None:
            lines.append(Line("live", [(each["k"], curve["live_mean"]) for each in curve["t"]], dashed=True))
        mark = curve["break_even"] if curve["break_even"] and curve["break_even"] <= curve["t"][-1]["k"] else None
        plots.append(
            (f"{kind} seconds, all blocks", plot(lines, x="trainings K", y="seconds", mark=mark, from_zero=True), kind)
        )
    everything = [("all", costs["all"]), *((f"block {each['block']}", each) for each in costs["blocks"])]
    for name, each in everything:
        for kind in ("wall", "device"):
            curve = each[kind]
            rows.append([
                name if kind == "wall" else "", kind, _n(seconds(curve["cache"])), _n(seconds(curve["cached_mean"])),
                _n("–" if curve["live_mean"] is None else seconds(curve["live_mean"])),
                *(_n(seconds(point["seconds"])) for point in curve["t"]),
                _n(_break_even(curve)),
            ])  # fmt: skip
    heads = ["", "", "#cache", "#cached run", "#live run", *(f"#T({each['k']})" for each in costs["all"]["wall"]["t"]),
             "#break-even"]  # fmt: skip
    notes = "".join(_soft(f"{escape(note[:1].upper() + note[1:])}.") for note in costs["notes"])
    return _section("Economics", _soft(SAID["economics"]) + _pair(*plots) + table(heads, rows) + notes)


def _break_even(curve: Mapping[str, Any]) -> str:
    if curve["live_mean"] is None:
        return "–"
    return "never" if curve["break_even"] is None else f"K = {curve['break_even']}"


def _generations(judged: Mapping[str, Any] | None) -> str:
    if judged is None:
        return ""
    inner = "".join(
        f"<h3>{escape(_said(each['prompt']))}</h3><div class=pair><div><h3>student</h3><blockquote>"
        f"{escape(_said(each['student']))}</blockquote></div><div><h3>teacher</h3><blockquote>"
        f"{escape(_said(each['teacher']))}</blockquote></div></div>"
        for each in judged["generations"]
    )
    return _section("Greedy generations", _soft(SAID["generations"]) + inner)


def _pins(value: Mapping[str, Any]) -> str:
    report = value["blocks"][0]["report"]
    rows = [["job", value["identity"]], ["snapshot", report["snapshot"]], ["pins", report["pins"]]]
    shown = value["snapshot"]
    for part in ("teacher", "data"):
        rows += [[f"{part}.{key}", _said(each)] for key, each in shown.get(part, {}).items()]
    if shown:
        rows += [["snapshot's size", size(shown["bytes"])], ["samples", f"{shown['samples']:,}"]]
        rows += [["columns", ", ".join(shown["columns"])]]
    rows += [[f"block {each['report']['block']}", each["report"]["state_digest"]] for each in value["blocks"]]
    rows += [["environment", ", ".join(f"{key} {each}" for key, each in report["environment"].items())]]
    cells = [[escape(a), f"<code>{escape(b)}</code>"] for a, b in rows]
    return _section("Pins and sizes", _soft(SAID["pins"]) + table(["", ""], cells))


# ---- pieces ----


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>{inner}</section>"


def _soft(html: str) -> str:
    return f"<p class=soft>{html}</p>"


def _pair(*plots: tuple[str, str, str]) -> str:
    """Plots side by side: a title, the SVG, and under which name ``SAID`` explains it."""
    inner = "".join(f"<div><h3>{title}</h3>{svg}{_soft(SAID[said])}</div>" for title, svg, said in plots)
    return f"<div class=pair>{inner}</div>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a head that begins with ``#`` is of numbers; cells are HTML."""
    head = "".join(f"<th class=n>{each[1:]}</th>" if each.startswith("#") else f"<th>{each}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(each if each.startswith("<td") else f"<td>{each}</td>" for each in row) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if any(heads) else ''}{body}</table>"


def _n(text: str) -> str:
    return f"<td class=n>{escape(text)}</td>"


def number(value: float | None) -> str:
    """A number for people: four digits; a dash for what is none."""
    return "–" if value is None else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def size(value: int) -> str:
    """Bytes for people."""
    scaled, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024 or unit == "TiB":
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"


def count(value: int) -> str:
    """A count for people."""
    return f"{value / 1e6:.1f} M" if value >= 1e5 else f"{value:,}"


def _said(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return value if isinstance(value, str) else json.dumps(value, default=_said, ensure_ascii=False)


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def _smooth(points: Sequence[tuple[float, float]], most: int = 160) -> list[tuple[float, float]]:
    """At most so many points, each the mean of those it stands for."""
    width = max(1, -(-len(points) // most))
    pieces = [points[at : at + width] for at in range(0, len(points), width)]
    return [(piece[-1][0], sum(y for _, y in piece) / len(piece)) for piece in pieces]
