"""On a GPU: nothing waits for the device between two looks at it, and a deterministic job resumes bit for bit."""

from __future__ import annotations

import pytest
import torch
from students import written
from torch import nn

import zgstore
from zgtrain.trainer import train_block

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x, mask=None):
        return self.inner(x, src_key_padding_mask=mask)


def train(folder, *, steps=9, forward=None, precision="fp32", deterministic=True, **options):
    torch.manual_seed(1)
    block = Attention()
    with zgstore.read(zgstore.Store.open(folder / "store"), "main") as reader:
        return train_block(
            block, reader, source="h.0", target="h.1", steps=steps, batch_size=4, device="cuda", forward=forward,
            precision=precision, deterministic=deterministic, optimizer=torch.optim.AdamW(block.parameters(), lr=1e-3),
            **options,
        )  # fmt: skip


def test_nothing_waits_for_the_device_between_two_looks(tmp_path):
    written(tmp_path)
    calls = []

    def forward(block, source, context):
        calls.append(1)
        torch.cuda.set_sync_debug_mode("error" if 2 <= len(calls) < 9 else "default")
        return block(source)

    try:
        report = train(tmp_path, forward=forward, log_every=100, deterministic=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.peak_memory_bytes > 0
    assert report.environment["device"] != "cpu"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_job_resumes_bit_for_bit(tmp_path, precision):
    written(tmp_path)
    whole = train(tmp_path, precision=precision)
    assert whole.deterministic
    seen = []
    with pytest.raises(zgstore.Interrupted):
        train(
            tmp_path, precision=precision, checkpoint=tmp_path / "c.pt", log_every=1,
            log=lambda line: seen.append(line["step"]), stop=lambda: bool(seen) and seen[-1] >= 4,
        )  # fmt: skip
    again = train(tmp_path, precision=precision, checkpoint=tmp_path / "c.pt")
    assert again.resumed_from == 4
    assert again.state_digest == whole.state_digest


def test_the_device_learns_what_the_processor_learns(tmp_path):
    written(tmp_path, ragged=True)

    def forward(block, source, context):
        return block(source, ~context["mask"])

    with zgstore.read(zgstore.Store.open(tmp_path / "store"), "main") as reader:
        found = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(1)
            block = Attention().to(torch.float32)
            block.inner.eval()
            for part in block.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
            found.append(
                train_block(block, reader, source="h.0", target="h.1", steps=8, device=device, forward=forward,
                            optimizer=torch.optim.SGD(block.parameters(), lr=1e-2))
            )  # fmt: skip
    assert found[1].last_window_mean_loss == pytest.approx(found[0].last_window_mean_loss, rel=1e-3)
