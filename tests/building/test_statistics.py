"""Boundaries are looked at as they pass, and rows that are not finite are found."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zgstore.building.statistics import Seen, look, nonfinite_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_what_is_seen_is_of_all_elements(dtype):
    x = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen, wide = look(x), x.double()
    assert seen.count == x.numel()
    assert seen.rms == pytest.approx(float(wide.square().mean().sqrt()), rel=1e-5)
    assert (seen.low, seen.high) == (float(wide.min()), float(wide.max()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named(bad):
    x = torch.ones(5, 4)
    x[1, 2] = x[4, 0] = bad
    assert nonfinite_rows(x) == (1, 4)
    assert look(x) == Seen(18, 18.0, 1.0, 1.0)
    assert nonfinite_rows(x, torch.tensor([2, 0, 2, 1])) == (0, 3)


def test_a_mask_is_no_fault():
    x = torch.ones(3, 2)
    x[0, 0], x[1, 1], x[2, 0] = -math.inf, math.inf, math.nan
    assert nonfinite_rows(x, masks=True) == (1, 2)


@pytest.mark.parametrize("size", [3e38, 1e-30, 1e-45])
def test_huge_and_tiny_values_have_their_size(size):
    x = torch.tensor([[size, -size]])
    seen = look(x)
    assert seen.count == 2
    assert seen.rms == pytest.approx(float(x[0, 0]), rel=1e-5)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=9))
def test_any_bits_of_bf16_are_seen_as_the_numbers_they_are(bits):
    x = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    seen, wide = look(x), x.double()
    finite = wide[wide.isfinite()]
    assert seen.count == len(finite)
    if len(finite):
        assert (seen.low, seen.high) == (float(finite.min()), float(finite.max()))
        assert seen.square_sum == pytest.approx(float(finite.square().sum()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_has_no_sign(dtype):
    assert str(look(torch.tensor([[-0.0]], dtype=dtype)).as_value()) == "{'rms': 0.0, 'min': 0.0, 'max': 0.0}"


def test_nothing_finite_and_nothing_at_all():
    nan = torch.full((2, 3), math.nan)
    assert nonfinite_rows(nan) == (0, 1)
    assert look(nan).as_value() == {}
    assert look(torch.zeros(0, 4)) == look(torch.ones(3, 2, dtype=torch.int64)) == Seen()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 10**6))
def test_parts_join_to_the_whole(sizes, seed):
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed))
    x[x > 2] = math.nan
    joined = sum(map(look, x.split(sizes)), Seen())
    whole = look(x)
    assert joined.count == whole.count
    assert joined.rms == pytest.approx(whole.rms, rel=1e-5)
    assert joined.as_value().keys() == whole.as_value().keys()


def test_pieces_smaller_than_the_tensor_change_nothing(monkeypatch):
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    x[3, 3] = math.nan
    whole = look(x)
    monkeypatch.setattr("zgstore.building.statistics._PIECE", 12)
    cut = look(x)
    assert (cut.count, cut.low, cut.high) == (whole.count, whole.low, whole.high)
    assert cut.rms == pytest.approx(whole.rms, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_fp8_that_are_not_finite_are_found(dtype):
    x = torch.ones(3, 4).to(dtype)
    x.view(torch.uint8)[1, 2] = 0x7F
    assert look(x).count == 11
    assert nonfinite_rows(x) == (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_view_is_seen_as_its_elements(dtype):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (x[:, 0], x[:, :1], x[:, ::2], x.T, x[0, 0].expand(5), torch._neg_view(x)):
        assert look(view) == look(view.resolve_neg().clone())


def test_squares_beyond_fp64_are_infinite_and_say_nothing(recwarn):
    assert look(torch.tensor([[1e200]], dtype=torch.float64)).rms == math.inf
    assert not recwarn.list


def test_a_parameter_and_what_inference_left_are_looked_at():
    with torch.inference_mode():
        left = torch.ones(2, 2)
    assert look(left) == look(torch.nn.Parameter(torch.ones(2, 2))) == Seen(4, 4.0, 1.0, 1.0)


def test_torchs_defaults_change_nothing():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seen = look(x)
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        assert look(x) == seen
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
