"""Real inputs, changed in every way that somebody thought of: a typed error, or what was written; always in bounds."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import targets
from tests.fuzz.bounds import MAX_INPUT_BYTES
from tests.fuzz.trees import Choices, as_msgpack, from_msgpack
from zgstore.errors import Corrupt, Invalid
from zgstore.format import canonical
from zgstore.storage.leases import _boot

TARGETS = targets.all_targets()
EXAMPLES = 500  # of the fastest, and the same each time: `make fuzz` looks for others


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_the_rule_of_its_surface(name):
    target = TARGETS[name]

    @settings(max_examples=max(30, EXAMPLES // target.cost), deadline=None, derandomize=True,
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(st.binary(min_size=8, max_size=48))
    def hold(choices):
        body = choices if target.change is None else target.change(Choices(choices))
        if len(body) <= MAX_INPUT_BYTES:
            target(body)

    for seed in target.seeds:
        target(seed)
    hold()


@pytest.mark.parametrize("name", TARGETS)
def test_what_nobody_changed_is_taken(name):
    target = TARGETS[name]
    several = {"blob", "blob file", "name", "names' files"}  # each is read as several things, of which it is one
    for body in () if name in several else target.seeds or (b"",):
        target.rule(body)


def changed(body, **fields):
    """Metadata with other fields, and right digests."""
    return canonical.encode({**canonical.decode(body), **fields})


def recalled(**fields):
    """A memory of a plan whose first column says something else."""
    (body,) = TARGETS["recall"].seeds
    value = canonical.decode(body)
    value["columns"][0] |= fields
    return canonical.encode(value)


def without(body, *keys):
    """A snapshot, or its first column, that does not say these."""
    tree = from_msgpack(body)
    for key in keys:
        holder = dict(tree)["columns"][0] if key == "depth" else tree
        holder[:] = [pair for pair in holder if pair[0] != key]
    return as_msgpack(tree)


SNAPSHOT, _, _, _, _, _, DROPPED = targets.ENCODED
ACTION = targets.ACTION.encode()[:-32]
RECALLED = TARGETS["recall"].seeds[0]
JOB = b'output = "o"\n[snapshot]\nstore = "s"\nrev = "r"\n[student]\nblock = "m:f"\n[train]\nsteps = 1\n'
RECIPE = b"""
[teacher]
factory = "m:f"
id = "t"
revision = "1"
[data]
factory = "m:f"
id = "d"
revision = "1"
[capture]
extractor = "m:f"
"""
DEEP, LONG = b"[" * 5000 + b"]" * 5000, b"9" * 5000
# Inputs that once were taken, or raised what nobody expects, and how they are refused; "" is: nothing comes of them.
FOUND = [
    ("metadata", changed(DROPPED, reasons=["NaN", "Inf", "too short"]), "in order"),
    ("metadata", changed(DROPPED, reasons=["Inf", "NaN", "a", "too short"]), "each once"),
    ("metadata", without(SNAPSHOT, "dropped"), "32 bytes"),  # two encodings of a snapshot where none is dropped
    ("metadata", without(SNAPSHOT, "depth"), "depth"),
    ("metadata", changed(SNAPSHOT, cut=0), "cut"),
    ("metadata", changed(SNAPSHOT, samples=-1), "samples"),
    ("metadata", canonical.encode({"kind": "x" * 30_000}), "its kind is"),  # the message was as long
    ("action", changed(ACTION, shape=[1, "x"]), "shape"),
    ("action", changed(ACTION, platform={"torch": 2}), "text"),
    ("action", changed(ACTION, rows=-1), "rows"),
    ("recall", recalled(statistics=b""), ""),
    ("recall", recalled(blobs=b"1234"), ""),
    ("recall", recalled(nonfinite_at=bytes(16)), ""),
    ("recall", recalled(dtype=3), ""),
    ("recall", changed(RECALLED, columns=[]), ""),
    ("lease", changed(targets.LEASE, boot=_boot(), pid=1 << 48), ""),
    ("lease", changed(targets.LEASE, boot=_boot(), pid=-1), ""),
    ("recipe", b"a = " + DEEP, "deep"),
    ("recipe", b"a = 0x" + b"f" * 5000, "64 bits"),
    ("recipe", b"a = " + LONG, "not TOML"),
    ("recipe", RECIPE.replace(b'id = "t"', b'id = "\\u0000"'), "NUL"),
    ("recipe", RECIPE + b'code = ["' + b"a" * 300 + b'"]', "not there"),
    ("recipe", b"#" * (1 << 20) + b"\n", "bytes"),
    ("job", JOB + b'optimizer = { name = "m:f", since = 1979-05-27 }', "date"),
    ("job", JOB + b"[launch.blocks." + LONG + b"]", "no block"),
    ("job", JOB + b"[launch.blocks.00]", "no block"),
    ("override", b"student.args=" + DEEP, "a table"),
    ("override", b"train.lr=" + LONG, "a number"),
    ("override", b"#=1", "not a key"),
    ("lock file", targets.LOCKED + b'[x]\nsnapshot = "' + b"0" * 64 + b'"\nrecipe = 3\npins = "x"', "'x'"),
    ("lock file", b"main = 3", "'main'"),
    ("lock file", b"a = " + DEEP, "deep"),
    ("configuration", b"a = " + DEEP, "deep"),
    ("configuration", b'format = 1\nrequires = ["' + b"x" * 20_000 + b'"]', "needs the feature"),
]


@pytest.mark.parametrize(("name", "body", "why"), FOUND, ids=[f"{at}-{each[0]}" for at, each in enumerate(FOUND)])
def test_what_was_found_once_is_refused(name, body, why):
    target = TARGETS[name]
    target(body)
    if not why:  # the target lets nothing through
        return
    with pytest.raises((Corrupt, Invalid)) as caught:
        target.rule(body)
    assert why in caught.value.message + caught.value.hint


def test_the_rules_can_be_broken(monkeypatch):
    """Each check of the frame around them, seen to fail."""
    frame = targets.Target("broken", lambda body: bytearray(1 << 30) and None, ())
    with pytest.raises(MemoryError):
        frame(b"")
    with pytest.raises(AssertionError, match="MiB"):
        targets.Target("broken", lambda body: bytearray(1 << 28) and None, (), tight=False)(b"")
    monkeypatch.setattr("tests.fuzz.bounds.SECONDS", 0.05)
    with pytest.raises(BaseException, match="processor time"):
        targets.Target("broken", spin, ())(b"")
    with pytest.raises(AssertionError, match="remedy"):
        targets.Target("broken", refuse, (Invalid,))(b"")


def spin(body):
    while True:
        json.dumps([1])


def refuse(body):
    raise Invalid("no", hint="")
