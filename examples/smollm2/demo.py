"""The whole tour on a real language model: every line below is a `zgstore` command whose answer is checked.

Run it with `make demo`, or `python examples/smollm2/demo.py`. It works in `.demo/`, which it makes anew.
"""

from __future__ import annotations

import json
import shutil
import time

from commands import HERE, SCRATCH, found, size, zgstore

STARTED = time.monotonic()
BOUNDARIES = 5
ROWS = 88  # of the longer stream
MORE = "model.layers.11:in"


def recipe(name: str, **changes: tuple[str, str]) -> str:
    """Write a recipe that differs from the example's in the given pieces, and return its name."""
    text = (HERE / "smollm2.toml").read_text(encoding="utf-8")
    for old, new in changes.values():
        assert text.count(old) == 1, f"{old!r} is not once in the recipe"
        text = text.replace(old, new)
    (SCRATCH / name).write_text(text, encoding="utf-8")
    return name


def first_build() -> dict:
    store = zgstore("init")
    found(f"an empty store at {store['store'].rpartition('/')[2]}", store)

    points = zgstore("points", "smollm2.toml")
    names = {point["name"] for point in points["points"]}
    assert {"model.layers.0:in", "model.norm:in", MORE} <= names
    found(f"{len(names)} hook points", points)

    estimate = zgstore("estimate", "smollm2.toml")
    found(f"{estimate['samples']} samples, {size(estimate['bytes']['new'])} to store", estimate)

    built = zgstore("build", "smollm2.toml", "--ref", "main")
    assert built["teacher_loaded"]
    assert built["samples"] == 80
    assert built["shards"] == {"built": 5, "reused": 0}
    off = abs(built["bytes"]["new"] / estimate["bytes"]["new"] - 1)
    assert off < 0.01, f"the estimate was {off:.1%} off"
    found(
        f"80 samples of 128 tokens at {BOUNDARIES} boundaries: 5 shards, {size(built['bytes']['new'])}, "
        f"teacher {built['seconds']['teacher']:.1f} s; the estimate was {off:.2%} off",
        built,
    )

    verified = zgstore("verify")
    assert verified["ok"]
    assert not verified["problems"]
    found(f"{verified['objects']} objects sound, {size(verified['bytes'])} hashed again", verified)
    return built


def what_a_memo_saves(built: dict) -> dict:
    again = zgstore("build", "smollm2.toml", "--ref", "main")
    own = again["seconds"]["total"] - again["seconds"]["inputs"]
    assert not again["teacher_loaded"]
    assert again["snapshot"] == built["snapshot"]
    assert again["shards"] == {"built": 0, "reused": 5}
    assert own <= 1, f"{own:.2f} s of its own work"
    found(f"nothing new: 5 shards reused, no teacher loaded, {own:.2f} s beyond reading the inputs", again)

    longer = recipe("longer.toml", rows=("rows = 80", "rows = 88"))
    grown = zgstore("build", longer, "--ref", "main")
    assert grown["samples"] == ROWS
    assert grown["shards"] == {"built": 1, "reused": 5}
    found(f"10 % more text: 1 shard captured, 5 reused, {size(grown['bytes']['new'])} new", grown)

    wider = recipe(
        "wider.toml",
        rows=("rows = 80", "rows = 88"),
        point=('    "model.layers.15:in",', f'    "{MORE}",\n    "model.layers.15:in",'),
    )
    widened = zgstore("build", wider, "--ref", "main", "--explain")
    assert {each["column"] for each in widened["explain"] if not each["hit"]} == {MORE}
    assert widened["columns"]["built"] == 1, widened["columns"]
    assert grown["snapshot"] != widened["snapshot"]
    found(f"one more boundary: only {MORE} captured, {size(widened['bytes']['new'])} new", widened)
    return widened


def another_teacher(main: dict) -> None:
    rounded = recipe(
        "rounded.toml",
        rows=("rows = 80", "rows = 88"),
        point=('    "model.layers.15:in",', f'    "{MORE}",\n    "model.layers.15:in",'),
        teacher=('attn_implementation = "sdpa"', 'attn_implementation = "sdpa", round_weights_bits = 8'),
        revision=("Q4_1", "Q4_1, linear weights rounded to 8 bits"),
    )
    other = zgstore("build", rounded, "--ref", "rounded")
    assert other["snapshot"] != main["snapshot"]
    found(f"the same data under a changed teacher: {size(other['bytes']['new'])} new", other)

    diff = zgstore("diff", "main", "rounded")
    changed = {pin["field"] for pin in diff["pins"]}
    assert not diff["same"]
    assert "teacher.measured" in changed, changed
    assert not any(field.startswith("data") for field in changed), changed
    found(f"pins that differ: {', '.join(sorted(changed))}; {size(diff['bytes']['shared'])} shared", diff)

    values = zgstore("diff", "main", "rounded", "--values")
    for name, moved in values["values"].items():
        if ":" in name:
            print(f"    {name:<22} relative L2 {moved['rel_l2']:.5f}   cosine at least {moved['cos_min']:.5f}")
    deepest = values["values"]["model.norm:in"]
    assert 0 < deepest["rel_l2"] < 0.2
    assert values["values"]["model.layers.0:in"]["max_abs"] == 0, "the embedding was not rounded"
    found("what enters layer 0 is the same bits, for the embedding was left as it was", values)


def forget_and_collect() -> None:
    forgotten = zgstore("ref", "rm", "rounded")
    found("the changed teacher's snapshot has no name any more", forgotten)
    said = zgstore("gc", "--dry-run", "--now")
    found(f"{said['freed']['objects']} objects that nothing else needs, {size(said['freed']['bytes'])}", said)
    done = zgstore("gc", "--now")
    assert done["freed"] == said["freed"], (said["freed"], done["freed"])
    assert done["freed"]["bytes"] > 0
    found(f"freed {done['freed']['objects']} objects, {size(done['freed']['bytes'])}: what the dry run said", done)
    verified = zgstore("verify")
    assert verified["ok"]
    found(f"{verified['objects']} objects sound", verified)


def carry_and_export(main: dict) -> None:
    zgstore("init", "second", say=False)
    copied = zgstore("copy", "main", "--to", "second")
    listed = zgstore("ls", "--store", "second", say=False)
    assert [(ref["name"], ref["snapshot"]) for ref in listed["refs"]] == [("main", main["snapshot"])]
    found(f"a second store has main at the same digest {main['snapshot'][:19]}…", copied)
    verified = zgstore("verify", "--store", "second")
    assert verified["ok"]
    found(f"{verified['objects']} objects sound there", verified)

    exported = zgstore("export", "main", "plain")
    manifest = json.loads((SCRATCH / "plain" / "manifest.json").read_text(encoding="utf-8"))
    same = [as_exported(column).equal(as_read(column["name"])) for column in manifest["columns"]]
    assert all(same), same
    assert manifest["rows"] == ROWS
    found(f"{len(same)} columns read back by plain safetensors, bit for bit what zgstore reads", exported)


def as_exported(column: dict):
    """One column of the export, without zgstore."""
    import torch  # noqa: PLC0415 — takes seconds, and no command needed it in this process
    from safetensors.torch import load_file  # noqa: PLC0415

    return torch.cat([load_file(SCRATCH / "plain" / each["file"])["data"] for each in column["files"]])


def as_read(name: str):
    """The same column, through the library."""
    import zgstore as library  # noqa: PLC0415 — the function above has its name

    with library.read(library.Store.open(SCRATCH / ".zgstore"), "main", columns=[name]) as reader:
        return reader.column(name)[0:ROWS].clone()


def main() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir()
    recipe("smollm2.toml")
    widened = what_a_memo_saves(first_build())
    another_teacher(widened)
    forget_and_collect()
    carry_and_export(widened)
    print(f"\nAll of it held, in {time.monotonic() - STARTED:.0f} s. The store is {SCRATCH / '.zgstore'}")


if __name__ == "__main__":
    main()
