"""``make bench-peers``: every peer that is installed, on the same boundaries; a Markdown table, and ``bench.json``."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tests.benchmarks import results
from tests.benchmarks.measuring import Entry, compare, prefault, settle, told
from tests.benchmarks.peers import boundaries
from tests.benchmarks.peers.boundaries import Boundaries, Piece
from tests.benchmarks.peers.libraries import Datasets, Icechunk, Lance
from tests.benchmarks.peers.ours import Zgstore
from tests.benchmarks.peers.peer import Peer, Read
from tests.benchmarks.peers.tools import Borg, Dvc, GitAnnex, Ostree, Restic

PEERS: Final[tuple[type[Peer], ...]] = (Zgstore, Dvc, GitAnnex, Restic, Borg, Ostree, Icechunk, Lance, Datasets)
MEASURES: Final = ("durable ingest", "full verify", "read of 4 MiB", "the same again", "10 % more", "kept")
FASTER: Final = MEASURES[:3]  # where we promise to be faster than each
READS: Final = 15

Times = dict[str, dict[str, list[float]]]  # by measure and peer
Bits = dict[str, tuple[str, str]]  # peer → what became of a flipped bit when it was read, and when verified


def timed(work: Callable[[], object]) -> float:
    """Seconds of it."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def durable(work: Callable[[], None]) -> float:
    """Seconds until what it writes is on the disk, whether or not it sees to that itself."""
    return timed(lambda: (work(), os.sync()))


def same(given: Read, piece: Piece) -> bool:
    """Whether what was read is the piece, bit for bit."""
    return bytes(given) == piece.tobytes() if not isinstance(given, np.ndarray) else np.array_equal(given, piece)


def life(peer: Peer, times: Times, *, seed: int) -> None:
    """Everything that is timed, from the first byte on; each measure goes into ``times``."""

    def put(measure: str, value: float) -> None:
        times[measure][peer.name].append(value)

    peer.prepare()
    settle()
    put("durable ingest", durable(peer.ingest))
    put("kept", bytes_in(peer.kept()) / peer.data.bytes)
    put("the same again", durable(peer.again))
    peer.prepare_more()
    settle()
    put("10 % more", durable(peer.grow))
    if peer.verifies:
        put("full verify", timed(peer.verify))
    pick = random.Random(seed)
    chosen = [pick.randrange(len(peer.data.first)) for _ in range(READS)]
    for number in chosen:  # which opens what is to be opened
        assert same(peer.read(number), peer.data.first[number]), f"{peer.name} gives back something else"
    put("read of 4 MiB", statistics.median(timed(lambda number=number: peer.read(number)) for number in chosen))


def bytes_in(folder: Path) -> int:
    """Bytes of the disk that a folder takes, each file once."""
    blocks = {(stat.st_dev, stat.st_ino): stat.st_blocks for path in folder.rglob("*") for stat in [path.lstat()]}
    return 512 * sum(blocks.values())


def flip(folder: Path) -> None:
    """Flip one bit in the middle of the largest file, its size and time as they were."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    path = max(files, key=lambda path: path.stat().st_size)
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    path.chmod(before.st_mode & 0o7777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flipped(peer: Peer) -> tuple[str, str]:
    """What becomes of one flipped bit when everything is read, and when it is verified."""
    flip(peer.kept())
    try:
        peer.forget()
        alike = all(same(given, piece) for given, piece in zip(peer.everything(), peer.data.all, strict=True))
        on_read = "not met" if alike else "given back in silence"
    except Exception:  # noqa: BLE001 - whatever a peer says is better than nothing
        on_read = "found"
    if not peer.verifies:
        return on_read, "no such check"
    try:
        peer.verify()
    except Exception:  # noqa: BLE001
        return on_read, "found"
    return on_read, "not found"


def measure(scratch: Path, data: Boundaries, peers: Sequence[type[Peer]], *, n: int) -> tuple[Times, Bits]:
    """Every peer's life, ``n`` times in shuffled order; in the last, a bit is flipped."""
    times: Times = defaultdict(lambda: defaultdict(list))
    bits: Bits = {}
    order = random.Random(0)
    for number in range(n):
        for kind in order.sample(list(peers), len(peers)):
            folder = scratch / "peer"
            folder.mkdir()
            peer = kind(folder, data)
            life(peer, times, seed=number)
            if number == n - 1:
                bits[peer.name] = flipped(peer)
            peer = None  # lets go of its files
            shutil.rmtree(folder)
    return times, bits


def entries_of(times: Times, bits: Bits) -> list[Entry]:
    """Ours against each, measure by measure."""
    entries, mine = [], Zgstore.name
    for what in MEASURES:
        for other in sorted(set(times[what]) - {mine}):
            sides, name = {"ours": times[what][mine], "other": times[what][other]}, f"{what}, against {other}"
            if what in FASTER:
                entries.append(compare(name, sides, ours="ours", other="other", at_least=1))
            else:
                unit = "of the data" if what == "kept" else "s"
                entries.append(told(name, sides["ours"], sides["other"], unit=unit))
    found = {"ours": [float(bits[mine].count("found"))], "other": [2.0]}
    name = "a flipped bit of ours, found on read and by verify"
    return [*entries, compare(name, found, ours="other", other="ours", at_least=1, unit="times")]


def table(times: Times, bits: Bits, absent: dict[str, str]) -> list[str]:
    """Lines of Markdown: a row for each peer."""
    headings = [*MEASURES, "one flipped bit, read", "and verified"]
    lines = [f"| | {' | '.join(headings)} |", f"|---|{'--:|' * len(MEASURES)}---|---|"]
    for name, (on_read, on_verify) in sorted(bits.items(), key=lambda item: item[0] != Zgstore.name):
        cells = [_cell(what, times[what].get(name)) for what in MEASURES]
        lines.append(f"| {' | '.join([name, *cells, on_read, on_verify])} |")
    return lines + [f"| {name} | skipped: {why} |{' |' * (len(headings) - 1)}" for name, why in absent.items()]


def _cell(what: str, values: list[float] | None) -> str:
    if not values:
        return "–"
    value = statistics.median(values)
    if what == "kept":
        return f"{value:.2f} ×"
    return f"{1000 * value:.3g} ms" if value < 0.1 else f"{value:.2f} s"


def main() -> None:
    """Run the peers that are there."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="PEER", help=f"of {', '.join(p.name for p in PEERS)}; default all")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of boundaries")
    parser.add_argument("--n", type=int, default=5, help="rounds")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: here)")
    given = parser.parse_args()
    chosen = [peer for peer in PEERS if not given.only or peer.name in {Zgstore.name, *given.only}]
    absent = {peer.name: peer.absent() for peer in chosen if peer.absent()}
    for name, why in absent.items():
        print(f"{name} is skipped: {why}")
    data = boundaries.made(given.gib)
    with tempfile.TemporaryDirectory(dir=given.scratch or Path.cwd(), prefix=".bench-") as scratch:
        prefault(2 * data.bytes)
        times, bits = measure(Path(scratch), data, [peer for peer in chosen if peer.name not in absent], n=given.n)
    entries, lines = entries_of(times, bits), table(times, bits, absent)
    results.keep("peers", entries, peers=lines)
    results.show(entries)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
