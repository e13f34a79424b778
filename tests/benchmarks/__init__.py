"""Ratios, measured in one run: both sides interleaved in shuffled order, medians, never asserted in the suite."""
