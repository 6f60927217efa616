import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_packing.model import attention
from composer_packing.model.attention import Segments, attend


def segments_of(lengths: list[int]) -> Segments:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Segments(cu_seqlens, max(lengths), sum(lengths))


def naive(qkv: Tensor, lengths: list[int], window: int | None, causal: bool) -> Tensor:
    """Attention with a full mask, as simple as possible."""
    query, key, value = qkv.permute(1, 2, 0, 3)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(document))
    visible = document[:, None] == document
    if window is not None:
        visible &= (position[:, None] - position).abs() <= window
    if causal:
        visible &= position[:, None] >= position
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    attended: Tensor = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value
    return attended.transpose(0, 1)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([None, 1, 2, 3, 8, 64]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_a_full_mask(
    lengths: list[int], window: int | None, causal: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(lengths), 2, 4, generator=generator, dtype=torch.float64)
    expected = naive(qkv, lengths, window, causal)
    got = attend(qkv, segments_of(lengths), window, causal)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad((got * weight).sum(), qkv)[0],
        torch.autograd.grad((expected * weight).sum(), qkv)[0],
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_another_document_does_not_change_a_bit(window: int | None, causal: bool) -> None:
    segments = segments_of([7, 19, 11])
    qkv = torch.randn(37, 3, 2, 8)
    other = qkv.clone()
    other[7:26] = torch.randn(19, 3, 2, 8) * 100
    moved = (attend(qkv, segments, window, causal) != attend(other, segments, window, causal)).flatten(1).any(1)
    assert moved.tolist() == [False] * 7 + [True] * 19 + [False] * 11


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([None, 1, 3, 8, 64]),
    st.data(),
)
def test_with_causal_attention_a_later_token_does_not_change_a_bit_of_an_earlier_one(
    lengths: list[int], window: int | None, data: st.DataObject
) -> None:
    segments, row_len = segments_of(lengths), sum(lengths)
    changed = data.draw(st.integers(0, row_len - 1))
    qkv = torch.randn(row_len, 3, 2, 8, generator=torch.Generator().manual_seed(1))
    other = qkv.clone()
    other[changed] = -100 * qkv[changed]
    moved = (attend(qkv, segments, window, True) != attend(other, segments, window, True)).flatten(1).any(1)
    end = int(segments.cu_seqlens[segments.segment[changed] + 1])
    reach = end if window is None else min(end, changed + window + 1)
    assert moved.nonzero().flatten().tolist() == list(range(changed, reach))


def test_positions_restart_in_every_segment() -> None:
    segments = segments_of([3, 1, 2])
    assert segments.position.tolist() == [0, 1, 2, 0, 0, 1]
    assert segments.segment.tolist() == [0, 0, 0, 1, 2, 2]


def test_windows_need_memory_in_proportion_to_the_row() -> None:
    """A mask of `row_len * row_len` would have 2**30 entries here."""
    row_len, window = 2**15, 16
    mask = segments_of([row_len]).block_mask(window)
    assert mask.numel() == row_len * 3 * window
    qkv = torch.randn(row_len, 3, 1, 4)
    assert attend(qkv, segments_of([row_len]), window).isfinite().all()


def test_the_kernel_of_flash_attn_is_called_with_the_segments_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have no GPU, so a stand-in with the documented signature replaces the kernel."""
    calls: list[dict[str, Any]] = []

    def flash_attn_varlen_qkvpacked_func(
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        calls.append({"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "window_size": window_size})
        side = window_size[0]
        return naive(qkv, cu_seqlens.diff().tolist(), None if side < 0 else side, causal)

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_varlen_qkvpacked_func = flash_attn_varlen_qkvpacked_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    monkeypatch.setattr(attention, "uses_flash", lambda device, dtype: True)
    attention._flash_attn.cache_clear()
    segments = segments_of([9, 5])
    qkv = torch.randn(14, 3, 2, 4)
    try:
        for causal in (False, True):
            for window in (None, 2):
                torch.testing.assert_close(attend(qkv, segments, window, causal), naive(qkv, [9, 5], window, causal))
    finally:
        attention._flash_attn.cache_clear()
    assert [call["window_size"] for call in calls] == [(-1, -1), (2, 2), (-1, 0), (2, 0)]
    assert all(call["cu_seqlens"] is segments.cu_seqlens and call["max_seqlen"] == 9 for call in calls)


def test_the_kernel_in_use_is_described_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for installed, device, dtype, words in [
        (True, cuda, torch.bfloat16, "flash-attn, variable length"),
        (True, cuda, torch.float32, "16-bit"),
        (False, cuda, torch.bfloat16, "flash-attn is not installed"),
        (True, cpu, torch.float32, "no GPU"),
    ]:
        monkeypatch.setattr(attention, "flash_attn_is_installed", lambda installed=installed: installed)
        assert words in attention.describe_attention(device, dtype)
