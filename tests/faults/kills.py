"""Every operation killed, and told of errors, at each of its steps; then looked at, and run again.

``make kills`` runs all of it; the suite a sample: each kind of step once, and of each operation a few.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults import operations, steps
from tests.faults.operations import Operation, State, state_of, sweep_up
from tests.faults.steps import GO, KILL, Run, Step, Verdict
from zgstore.cli.faults import explain
from zgstore.errors import ZgError

ROOT = Path(__file__).parents[2]
WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile", "ftruncate", "fallocate"}
SYNCS = {"fsync", "fdatasync"}
RENAMES = {"rename", "renameat", "renameat2", "link", "linkat"}
MAKES = {"open", "openat", "creat", "mkdir", "mkdirat"}
FALLIBLE = WRITES | SYNCS | RENAMES | MAKES
# A writer may go on where these cannot be written: nobody relies on what they hold.
COURTESIES = {"index", "locks"}
ERRORS = {errno.EIO: "transient", errno.ENOSPC: "no_space"}
EACH_LASTING = 5  # in the full sweep, of how many steps one is the first of a lasting failure


@dataclass(slots=True)
class Counts:
    """What was tried of one operation, and what was found.

    Args:
        steps: Of the uninterrupted run.
        kills: How often it was killed.
        errors: How often it was told of one error.
        lasting: How often every step from some step on failed.
        findings: What did not hold, each in a few lines.
        seconds: Wall time.
    """

    steps: int = 0
    kills: int = 0
    errors: int = 0
    lasting: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Sweep:
    """One operation, interrupted again and again, each time in a fresh copy of the place it begins in."""

    def __init__(self, operation: Operation, folder: Path) -> None:
        self.operation, self.folder = operation, folder
        self.counts = Counts()
        self.origin = folder / "origin"
        self.origin.mkdir()
        gc.freeze()  # what all forks have in common, so that none copies it
        steps.alone(lambda: operation.prepare(self.origin))
        self.before = self._state(self.origin)
        with self.place() as place:
            whole = self._run(place, lambda _: GO)
            assert not whole.failed, whole.message
            self.steps, self.value = whole.steps, whole.value
            steps.alone(lambda: sweep_up(place))
            self.after = self._state(place)
        self.counts.steps = len(self.steps)

    def killed(self, number: int) -> None:
        """Kill it before a step."""
        with self.place() as place:
            ended = self._run(place, lambda step: KILL if step.number == number else GO)
            if ended.failed:
                self._found(f"to be killed at step {number}, it failed", ended.message)
            elif ended.killed:
                self.counts.kills += 1
                self.check(place, f"killed at {ended.steps[-1]}")

    def failed(self, number: int, error: int, *, lasting: bool = False) -> None:
        """Tell it of an error, once or from then on: it says which; done again, in the same process, it is done."""
        hit: list[Step] = []

        def decide(step: Step) -> Verdict:
            if step.call not in FALLIBLE or not (step.number >= number if lasting else step.number == number):
                return GO
            hit.append(step)
            return error

        with self.place() as place:
            ended = self._run(place, decide, again=not lasting)
            if not hit:
                return
            self.counts.lasting += lasting
            self.counts.errors += not lasting
            told = f"{errno.errorcode[error]}{' from here on' if lasting else ''} at {hit[0]}"
            self._hears(told, ERRORS[error], ended, courtesy=self._is_courtesy(hit[0]), lasting=lasting)
            self.check(place, told)

    def _hears(self, told: str, kind: str, ended: Run, *, courtesy: bool, lasting: bool) -> None:
        first = ended.value
        if ended.failed:
            self._found(f"{told}: failed again when it was run again", ended.message)
        elif first["kind"] != kind and not (courtesy and first["kind"] == ""):
            self._found(f"{told}: {first['kind'] or 'nothing'} was raised", first["message"])
        elif first["bare"] and self.operation.program == "zgstore":
            self._found(f"{told}: no error of ours was raised", first["message"])
        elif not lasting and first["value"] != self.value:
            self._found(f"{told}: comes to something else", str(first["value"]))

    def check(self, place: Path, what: str, *, done: bool = False) -> None:
        """It is sound, it can be run again to the same end, and then nothing is left of what befell it.

        Args:
            place: Where it was interrupted.
            what: How, for a finding.
            done: Whether it had come to its end before.
        """

        def check() -> None:
            self._holds(state_of(place), done=done)
            self.operation.check(place)
            value = self.operation.work(place)
            assert value == self.value, f"run again it comes to {value}, and uninterrupted to {self.value}"
            sweep_up(place)
            assert state_of(place) == self.after, f"run again it leaves {state_of(place)}, not {self.after}"

        try:
            steps.alone(check)
        except AssertionError as error:
            self._found(what, str(error))

    def _holds(self, now: State, *, done: bool) -> None:
        assert now.problems <= self.before.problems, f"not sound: {now.problems - self.before.problems}"
        for name in {*now.names, *self.before.names, *self.after.names}:
            new, old = self.after.names.get(name), self.before.names.get(name)
            assert now.names.get(name) in {new, new if done else old}, f"{name} is {now.names.get(name)}"

    def _run(self, place: Path, decide: Callable[[Step], Verdict], *, again: bool | None = None) -> Run:
        def work() -> Any:
            return self.operation.work(place) if again is None else self._heard(place, again)

        return steps.run(work, place, decide)

    def _is_courtesy(self, step: Step) -> bool:
        return not {*COURTESIES, *self.operation.courtesies}.isdisjoint(Path(step.path).parts)

    def _heard(self, place: Path, again: bool) -> dict[str, Any]:
        """What the first try raised, as the command would say it, and what it came to, the second time if need be."""
        told = {"kind": "", "bare": False, "message": "", "value": None}
        try:
            return {**told, "value": self.operation.work(place)}
        except Exception as error:  # noqa: BLE001 - which it is, is what is asked
            said = explain(error.with_traceback(_own_part(error.__traceback__)), program=self.operation.program)
            told |= {"kind": said.kind, "bare": not isinstance(error, ZgError)}
            told["message"] = f"{type(error).__name__}: {said.message}"
        return {**told, "value": self.operation.work(place)} if again else told

    def _state(self, place: Path) -> State:
        names, problems = steps.alone(lambda: _plain(state_of(place)))
        return State(names, frozenset(problems))

    def _found(self, what: str, why: str) -> None:
        self.counts.findings.append(f"{what}\n{why}")

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A copy of the place that it begins in, always under the same path."""
        place = self.folder / "place"
        subprocess.run(["cp", "-a", self.origin, place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["rm", "-rf", place], check=True)


def _plain(state: State) -> tuple[dict[str, str], list[str]]:
    return state.names, sorted(state.problems)


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame of what is tested: a command has nobody's code around it."""
    while trace is not None and ROOT / "tests" in Path(trace.tb_frame.f_code.co_filename).parents:
        trace = trace.tb_next
    return trace


# ---- which steps ----


def everything(sweep: Sweep) -> None:
    """Each step killed, and each that can fail failed in each way; each so-many-th is the first that fails for good."""
    listed = _without_hundreds_alike(sweep.steps)
    for number in (*(step.number for step in listed), len(sweep.steps) + 1):
        sweep.killed(number)
    fallible = [step.number for step in listed if step.call in FALLIBLE]
    for number in fallible:
        for error in ERRORS:
            sweep.failed(number, error)
    for at, number in enumerate(fallible[::EACH_LASTING]):
        sweep.failed(number, [*ERRORS][at % 2], lasting=True)


def _without_hundreds_alike(listed: Sequence[Step]) -> list[Step]:
    """Of the 768 folders of a new store each sixteenth; of all else everything."""
    alike: dict[tuple[str, Path], list[int]] = {}
    for step in listed:
        alike.setdefault((step.call, Path(step.path).parent), []).append(step.number)
    left_out = {n for numbers in alike.values() if len(numbers) > 100 for n in numbers if numbers.index(n) % 16}
    return [step for step in listed if step.number not in left_out]


class Sample:
    """Each kind of step is killed once, of whichever operation has it first, and of each the step in the middle.

    Of the kinds that can fail each second one fails, now with one error, now with the other, now for good.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()

    def __call__(self, sweep: Sweep) -> None:
        for step in self._new(sweep.steps, "kill"):
            sweep.killed(step.number)
        sweep.killed(len(sweep.steps) // 2)
        fallible = self._new([step for step in sweep.steps if step.call in FALLIBLE], "fail")
        for at, step in enumerate(fallible[1::2]):
            sweep.failed(step.number, [*ERRORS][at % 2], lasting=at % 3 == 2)

    def _new(self, listed: Sequence[Step], how: str) -> list[Step]:
        found = []
        for step in listed:
            # A folder is made, and a mode set, as another is.
            alike = step.call in MAKES or "chmod" in step.call
            kind = (how, step.call, *(() if alike else Path(step.path).parts[1:2]))
            if kind not in self._seen:
                self._seen.add(kind)
                found.append(step)
        return found


BYTES = tuple(operations.OPERATIONS)
TENSORS = (
    "import", "repair from a store", "repair from a recipe", "build", "build of more rows", "checkpoint",
    "sharded checkpoint", "training",
)  # fmt: skip


def operation(name: str) -> Operation:
    """An operation by its name; torch is loaded only for those that need it."""
    table = operations if name in BYTES else import_module("tests.faults.tensor_operations")
    return table.OPERATIONS[name]


def sweep(name: str, choose: Callable[[Sweep], None]) -> Counts:
    began, memory = time.monotonic(), Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        one = Sweep(operation(name), Path(folder))
        choose(one)
    one.counts.seconds = time.monotonic() - began
    return one.counts


# ---- the command ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", default=[*BYTES, *TENSORS], metavar="OPERATION")
    parser.add_argument("--sample", action="store_true", help="each kind of step once, and of each operation a few")
    parser.add_argument("--json", action="store_true", help="a JSON object for each operation, on a line")
    asked = parser.parse_args()
    # What Python keeps of a project's modules lies in the folder too, and is no step of ours.
    sys.dont_write_bytecode = True
    if why := steps.cannot():
        print(json.dumps({"skipped": why}) if asked.json else f"skipped: {why}")
        return 0
    if not asked.sample and len(asked.operations) > 1:
        return _each_in_a_process(asked.operations)
    choose, found = Sample() if asked.sample else everything, 0
    for name in asked.operations:
        counts = sweep(name, choose)
        found += len(counts.findings)
        print(json.dumps({"operation": name, **asdict(counts)}) if asked.json else _page(name, counts), flush=True)
    return 1 if found else 0


def _each_in_a_process(names: Sequence[str]) -> int:
    """As many at once as there are cores; their pages as they end, and then the sums."""
    began, total = time.monotonic(), Counts()

    def one(name: str) -> None:
        command = [sys.executable, "-m", "tests.faults.kills", "--json", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        counts = Counts(findings=[done.stderr])
        if done.stdout:
            counts = Counts(**{key: value for key, value in json.loads(done.stdout).items() if key != "operation"})
        print(_page(name, counts), flush=True)
        for key, value in asdict(counts).items():
            setattr(total, key, getattr(total, key) + value)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, names))
    total.seconds = time.monotonic() - began
    print(_page("all", total).split("\n")[0], flush=True)
    return 1 if total.findings else 0


def _page(name: str, counts: Counts) -> str:
    tried = f"killed {counts.kills} times, {counts.errors} errors, {counts.lasting} that last"
    found = f"{len(counts.findings)} findings; {counts.seconds:.0f} s"
    return "\n".join([f"{name}: {counts.steps} steps; {tried}; {found}", *(f"--- {each}" for each in counts.findings)])


if __name__ == "__main__":
    sys.exit(main())
