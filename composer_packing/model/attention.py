"""Attention inside the documents of one packed row.

`attend` is the entry point. It chooses one of three ways:

==========================================  =============================================================
when                                        how
==========================================  =============================================================
GPU, 16-bit dtype and flash-attn installed  flash-attn's kernel for sequences of varying length
otherwise, no window                        PyTorch's scaled dot product, one call for each segment
otherwise, with a window                    PyTorch's scaled dot product, one call for the row, in blocks
==========================================  =============================================================

None of them makes a mask of `row_len * row_len` entries. With a window, the row is divided into blocks of `window`
queries. Each block attends to its own keys and to those of the two neighbouring blocks::

    keys                [  block 0  ][  block 1  ][  block 2  ][  block 3  ]
    queries of block 1  ^-------------------------------------^

Of these `3 * window` keys, a mask hides the keys of other documents and the keys too far away. In causal attention a
query sees no later key, so a block attends only to itself and to the block before it.

With a window, memory grows with `row_len * window`. Without a window it is what PyTorch's kernel needs for the longest
document.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the segments of a row start and end. Made once per row, and used by every layer.

    Attributes:
        cu_seqlens: int32 `(segments + 1,)`, from 0 to the row length.
        max_seqlen: length of the longest segment.
        row_len: number of slots in the row.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    row_len: int

    @cached_property
    def segment(self) -> Tensor:
        """Segment of each slot: int64 `(row_len,)`."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.row_len)

    @cached_property
    def position(self) -> Tensor:
        """Position of each slot in its segment: int64 `(row_len,)`."""
        return torch.arange(self.row_len, device=self.cu_seqlens.device) - self.cu_seqlens[self.segment]

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each segment, as ints. Reading this waits for the device."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @cached_property
    def _block_masks(self) -> dict[tuple[int, bool], Tensor]:
        return {}

    def block_mask(self, window: int, causal: bool = False) -> Tensor:
        """Return which keys each query of a block may see.

        The slots that fill up the last block count as a segment of their own.

        Returns:
            bool `(blocks, 1, window, 3 * window)`, or `(blocks, 1, window, 2 * window)` if `causal`.
        """
        if (window, causal) not in self._block_masks:
            blocks = -(-self.row_len // window)
            filler = blocks * window - self.row_len
            own = F.pad(self.segment, (0, filler), value=-1)
            queries = own.view(blocks, window, 1)
            keys = _with_neighbours(own, window, causal, outside=-2)
            key_position = torch.arange(-window, keys.shape[1] - window, device=own.device)
            distance = key_position - torch.arange(window, device=own.device)[:, None]
            near = (distance >= -window) & (distance <= (0 if causal else window))
            self._block_masks[window, causal] = ((queries == keys[:, None]) & near)[:, None]
        return self._block_masks[window, causal]


def attend(qkv: Tensor, segments: Segments, window: int | None = None, causal: bool = False) -> Tensor:
    """Return softmax attention within each segment.

    Args:
        qkv: queries, keys and values, `(row_len, 3, heads, head_dim)`.
        segments: the segments of the row, on the device of `qkv`.
        window: number of tokens that a token sees to each side. None for its whole segment.
        causal: a token sees only itself and the tokens before it.

    Returns:
        `(row_len, heads, head_dim)`.
    """
    if uses_flash(qkv.device, qkv.dtype):
        side = -1 if window is None else window
        attended: Tensor = _flash_attn()(
            qkv,
            segments.cu_seqlens,
            segments.max_seqlen,
            dropout_p=0.0,
            causal=causal,
            window_size=(side, 0 if causal else side),
        )
        return attended
    # A window that spans the longest segment hides nothing.
    if window is None or window + 1 >= segments.max_seqlen:
        return _attend_by_segment(qkv, segments, causal)
    return _attend_by_block(qkv, segments, window, causal)


def _attend_by_segment(qkv: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Attend with one call per segment. `split` and `cat` are only one node each in the backward pass."""
    attended = []
    for part in qkv.split(segments.lengths):
        query, key, value = part.permute(1, 2, 0, 3).unsqueeze(1)  # 3 x (1, heads, length, head_dim)
        attended.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(attended)


def _attend_by_block(qkv: Tensor, segments: Segments, window: int, causal: bool) -> Tensor:
    """Attend with one call for the row, as the picture in the module's docstring shows."""
    row_len, _, heads, head_dim = qkv.shape
    mask = segments.block_mask(window, causal)
    blocks = len(mask)
    query, key, value = F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, blocks * window - row_len)).unbind(1)
    attended = F.scaled_dot_product_attention(
        query.view(blocks, window, heads, head_dim).transpose(1, 2),
        _with_neighbours(key, window, causal).transpose(1, 2),
        _with_neighbours(value, window, causal).transpose(1, 2),
        attn_mask=mask,
    )
    return attended.transpose(1, 2).reshape(blocks * window, heads, head_dim)[:row_len]


def _with_neighbours(slots: Tensor, window: int, causal: bool, outside: int = 0) -> Tensor:
    """Return each block of `window` slots joined with its neighbours.

    Args:
        slots: `(blocks * window, ...)`.
        window: slots in a block.
        causal: join a block with the block before it only.
        outside: value of the slots before the first block and after the last block.

    Returns:
        `(blocks, 3 * window, ...)`, or `(blocks, 2 * window, ...)` if `causal`.
    """
    at_the_ends = slots.new_full((window, *slots.shape[1:]), outside)
    padded = torch.cat([at_the_ends, slots, at_the_ends]).unflatten(0, (-1, window))
    neighbourhood = [padded[:-2], padded[1:-1]] if causal else [padded[:-2], padded[1:-1], padded[2:]]
    return torch.cat(neighbourhood, dim=1)


def uses_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend` uses flash-attn's kernel for tensors on this device and of this dtype."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and flash_attn_is_installed()


@cache
def flash_attn_is_installed() -> bool:
    """Return whether the optional package flash-attn is installed."""
    return importlib.util.find_spec("flash_attn") is not None


@cache
def _flash_attn() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_qkvpacked_func  # imported here because it is optional

    kernel: Callable[..., Any] = flash_attn_varlen_qkvpacked_func
    return kernel


def describe_attention(device: torch.device, dtype: torch.dtype) -> str:
    """Return a phrase for the start of a run: the kernel in use and, if the kernel is slow, the reason."""
    if uses_flash(device, dtype):
        return "flash-attn, variable length"
    if device.type != "cuda":
        return "PyTorch SDPA by document (no GPU)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch SDPA by document, slow: flash-attn takes 16-bit precision only, not {dtype}"
    return "PyTorch SDPA by document, slow: flash-attn is not installed"
