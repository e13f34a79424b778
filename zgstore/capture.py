"""The capture alone, without a store: hooks, extractors and what they give, for recipes and trainings."""

from __future__ import annotations

from zgstore.building.capture import Capture, Capturer, Extraction, Point, Pool, Trajectory, points, run, topk_logits

__all__ = ["Capture", "Capturer", "Extraction", "Point", "Pool", "Trajectory", "points", "run", "topk_logits"]
