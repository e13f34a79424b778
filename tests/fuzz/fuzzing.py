"""Every target in a process of its own under libFuzzer: how many executions, how long, what was found."""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

import atheris

from tests.fuzz import place
from tests.fuzz.bounds import MAX_INPUT_BYTES, SECONDS, Target
from tests.fuzz.targets import all_targets

RUNS = 1_000_000
MAX_FINDINGS = 20  # of one target; each place in the code once
_DONE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def main() -> int:
    options, targets = _options(), all_targets()
    if unknown := sorted({*options.target} - {*targets}):
        print(f"error: there is no target {unknown[0]!r}", file=sys.stderr)
        print(f"hint: one of {', '.join(targets)}", file=sys.stderr)
        return 2
    chosen = [target for target in targets.values() if target.name in (options.target or targets)]
    each = options.runs / sum(1 / target.cost for target in chosen)
    print(f"{'target':<16} {'executions':>10} {'seconds':>8} {'findings':>8}", flush=True)
    sums = (0, 0.0, 0)
    for target in chosen:
        line = _in_its_own(target, max(1, round(each / target.cost)), options)
        sums = (sums[0] + line[0], sums[1] + line[1], sums[2] + line[2])
        print(f"{target.name:<16} {line[0]:>10} {line[1]:>8.1f} {line[2]:>8}", flush=True)
    print(f"{'all':<16} {sums[0]:>10} {sums[1]:>8.1f} {sums[2]:>8}")
    return min(1, sums[2])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="The targets under atheris.")
    parser.add_argument("--runs", type=int, default=RUNS, help="executions in all; the fast targets get more of them")
    parser.add_argument("--seconds", type=int, default=0, help="of each target, at most; 0 for as long as it takes")
    parser.add_argument("--target", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="of the changes; 0 for another each time")
    parser.add_argument("--keep", type=Path, default=Path(".fuzz"), help="where inputs of findings go")
    return parser.parse_args()


def _in_its_own(target: Target, runs: int, options: argparse.Namespace) -> tuple[int, float, int]:
    """Executions, seconds and findings of one target, in a process that libFuzzer ends."""
    with tempfile.TemporaryDirectory(prefix="zgfuzz-", dir=place.MEMORY) as folder:
        log, begun = Path(folder) / "log", time.monotonic()
        child = os.fork()
        if not child:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            place.begin(folder)
            _fuzz(target, runs, options, Path(folder) / "corpus")
        _, status = os.waitpid(child, 0)
        said = log.read_text(errors="replace")
    found = [line for line in said.splitlines() if line.startswith("FOUND ")]
    done = _DONE.search(said)
    if done is None or status:  # the process itself ended: libFuzzer says why
        found.append(f"FOUND {target.name}: the process ended with {status}\n{said[-2000:]}")
    print("".join(f"{line}\n" for line in found), end="", file=sys.stderr, flush=True)
    return int(done[1]) if done else 0, time.monotonic() - begun, len(found)


def _fuzz(target: Target, runs: int, options: argparse.Namespace, corpus: Path) -> None:
    """Runs, and ends the process."""
    found = set[str]()

    def once(body: bytes) -> None:
        try:
            target(body)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            where = _place(error)
            if where not in found and len(found) < MAX_FINDINGS:
                found.add(where)
                _keep(options.keep / f"{target.name.replace(' ', '-')}-{len(found)}", body, error)
                print(f"FOUND {target.name}: {where}", flush=True)

    def change(body: bytes, most: int, number: int) -> bytes:
        if target.change is None or number % 4:
            return atheris.Mutate(body, most)
        return target.change(random.Random(number).randrange)[:most]

    corpus.mkdir()
    for at, body in enumerate(target.seeds):
        (corpus / str(at)).write_bytes(body)
    longest = 96 if target.change is None else MAX_INPUT_BYTES
    flags = [
        f"-runs={runs}", f"-max_total_time={options.seconds}", f"-max_len={longest}", f"-seed={options.seed}",
        f"-timeout={SECONDS * 20:.0f}", "-rss_limit_mb=4096", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags, str(corpus)], once, custom_mutator=change)
    atheris.Fuzz()


def _place(error: BaseException) -> str:
    """What was raised, and where in the product, or by which rule."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in frame.filename]
    inner = [frame for frame in frames if "/zgstore/" in frame.filename or "/zgtrain/" in frame.filename]
    last = (inner or frames)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:100]!r}"


def _keep(path: Path, body: bytes, error: BaseException) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)), errors="replace")
