"""Training on verified snapshots, block by block."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zgtrain.assembler import assemble as assemble
    from zgtrain.blockreport import BlockReport as BlockReport
    from zgtrain.blocks import run as run
    from zgtrain.evaluator import evaluate as evaluate
    from zgtrain.job import GradientSpec as GradientSpec
    from zgtrain.job import Job as Job
    from zgtrain.job import LossSpec as LossSpec
    from zgtrain.job import OptimizerSpec as OptimizerSpec
    from zgtrain.job import ScheduleSpec as ScheduleSpec
    from zgtrain.jobfile import load_job as load_job
    from zgtrain.launcher import launch as launch
    from zgtrain.launcher import plan as plan
    from zgtrain.noise import Diffusion as Diffusion
    from zgtrain.noise import Noise as Noise
    from zgtrain.progress import status as status
    from zgtrain.relaying import relay as relay
    from zgtrain.trainer import train_block as train_block

# Public name → the module that has it. Loaded when first asked for, so that a command that reads no tensor loads no
# torch. `zgtrain.causal_lm` is a module of its own.
_HOME_OF = {
    "BlockReport": "blockreport",
    "Diffusion": "noise",
    "GradientSpec": "job",
    "Job": "job",
    "LossSpec": "job",
    "Noise": "noise",
    "OptimizerSpec": "job",
    "ScheduleSpec": "job",
    "assemble": "assembler",
    "evaluate": "evaluator",
    "launch": "launcher",
    "load_job": "jobfile",
    "plan": "launcher",
    "relay": "relaying",
    "run": "blocks",
    "status": "progress",
    "train_block": "trainer",
}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - the table above is the one list of the names


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'zgtrain' has no attribute {name!r}")
    found = getattr(import_module(f"zgtrain.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
