"""The results as tables: markdown for people, CSV and a plot of cross entropy against wall seconds."""

from __future__ import annotations

import csv

from running import RESULTS, result

from zgtrain.plots import Line, plot


def write(names):
    """Everything that has a result so far.

    Args:
        names: Of ways, in the order of the rows.
    """
    build, fisher, start = (result(name) for name in ("build", "fisher-information", "start"))
    if not (build and fisher and start):
        raise SystemExit("there is nothing to report yet: run --part build first")
    found = {name: each for name in names if (each := result(name))}
    rows = [_row(name, each, start, _cache(each, build, fisher)) for name, each in found.items()]
    text = "\n".join([*_head(start, build, fisher), *rows]) + "\n"
    (RESULTS / "results.md").write_text(text, encoding="utf-8")
    _curves(found, build, fisher)
    print(text)
    print(f"written to {RESULTS}: results.md, ce-against-seconds.csv, ce-against-seconds.svg")


def _cache(each, build, fisher):
    """Seconds before the first step: of the snapshot, and of the Fisher information where that is used."""
    if each["way"] == "end-to-end":
        return 0.0
    return build["seconds"]["total"] + (fisher["seconds"] if each["fisher"] else 0.0)


def _head(start, build, fisher):
    said = (
        f"Teacher's CE {start['teacher']:.3f}, untrained student's {start['untrained']:.3f}. "
        f"Snapshot: {build['samples']} rows, {build['bytes']['total'] / 1e6:.0f} MB, "
        f"{build['seconds']['total']:.0f} s, {build['peak_memory_bytes'] / 1e6:.0f} MB of memory. "
        f"Fisher information: {fisher['rows']} rows, {fisher['seconds']:.0f} s."
    )
    if build["shards"]["reused"]:
        said += " The snapshot was found there, all of it or in part: these are not a build's seconds."
    return [
        said,
        "",
        "| way | steps | CE | above the teacher's | gates | critical path, s | with cache, s | device, s | peak, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


def _row(name, each, start, cache):
    ce = each["evaluation"]["student"]["ce"]
    failed = [gate["name"] for gate in each["evaluation"]["gates"] if not gate["passes"]]
    cells = [
        name, each["steps"], f"{ce:.3f}", f"{ce - start['teacher']:+.3f}",
        "all" if not failed else f"not {', '.join(failed)}", f"{each['critical_seconds']:.0f}",
        f"{each['critical_seconds'] + cache:.0f}", f"{each['device_seconds'] + cache:.0f}",
        f"{each['peak_memory_bytes'] / 1e6:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _curves(found, build, fisher):
    points = [
        (name, mark["step"], mark["seconds"], mark["seconds"] + _cache(each, build, fisher), mark["ce"])
        for name, each in found.items()
        for mark in each.get("curve")
        or [{"step": each["steps"], "seconds": each["critical_seconds"], "ce": each["evaluation"]["student"]["ce"]}]
    ]
    with (RESULTS / "ce-against-seconds.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("way", "step", "seconds", "seconds_with_cache", "ce"), *points])
    lines = [Line(name, [(at[3], at[4]) for at in points if at[0] == name], dots=True) for name in found]
    picture = plot(lines, x="wall seconds of the critical path, the cache included", y="held-out CE, nats")
    picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    (RESULTS / "ce-against-seconds.svg").write_text(picture, encoding="utf-8")
