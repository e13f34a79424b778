"""The targets under atheris, which follows coverage: ``python -m tests.fuzz [--runs 1000000] [--target NAME]``.

It needs ``pip install atheris``: a wheel without dependencies, which moves no other package. Each target runs in a
process of its own, from a corpus of real inputs; a quarter of the changes are the structured ones of the suite, the
others libFuzzer's. Prints executions, seconds and findings of each, and keeps the inputs of findings in ``--keep``.
"""

from __future__ import annotations

import sys

try:
    import atheris
except ModuleNotFoundError:
    print("error: atheris is not installed here", file=sys.stderr)
    print(f"hint: {sys.executable} -m pip install atheris", file=sys.stderr)
    sys.exit(2)

with atheris.instrument_imports(include=["zgstore", "zgtrain"]):
    from tests.fuzz import fuzzing

sys.exit(fuzzing.main())
