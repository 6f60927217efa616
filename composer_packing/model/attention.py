"""Attention inside the documents of one packed row, on the row's tokens as they are.

`attend` is the one way in. With a GPU, a 16-bit dtype and flash-attn installed it is flash-attn's
variable-length kernel. Anywhere else it is PyTorch's scaled dot product, arranged so that no mask of row by
row is ever made: global attention goes segment by segment; windowed attention goes over the whole row in
blocks of `window` queries, each against its own and the two neighbouring blocks of keys::

    keys       [  block 0  ][  block 1  ][  block 2  ][  block 3  ]
    queries of block 1:  ^------------^------------^   3 * window keys, those of other
                                                       documents or too far away masked

Causal attention sees no key behind its query: a segment's lower triangle, or of a window its own and the block before.

Memory is O(row) for windows and O(longest document) for PyTorch's kernel.
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
    """Where the segments of a row lie; made once per row, used by every layer.

    Attributes:
        cu_seqlens: int32 `(segments + 1,)`, from 0 to the row length.
        max_seqlen: longest segment.
        row_len: tokens in the row.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    row_len: int

    @cached_property
    def segment(self) -> Tensor:
        """int64 `(row_len,)`: the segment of each slot."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(numbers, lengths, output_size=self.row_len)

    @cached_property
    def position(self) -> Tensor:
        """int64 `(row_len,)`: the place of each slot within its segment."""
        return torch.arange(self.row_len, device=self.cu_seqlens.device) - self.cu_seqlens[self.segment]

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each segment, on the host. Asking waits for the device."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @cached_property
    def _block_masks(self) -> dict[tuple[int, bool], Tensor]:
        return {}

    def block_mask(self, window: int, causal: bool = False) -> Tensor:
        """bool `(blocks, 1, window, 3 * window)`: which keys each query of a block may see; causal, `2 * window`.

        Slots that fill the last block up count as a segment of their own.
        """
        if (window, causal) not in self._block_masks:
            blocks = -(-self.row_len // window)
            filler = blocks * window - self.row_len
            own = F.pad(self.segment, (0, filler), value=-1)
            queries = own.view(blocks, window, 1)
            keys = _with_neighbours(own, window, causal, outside=-2)
            place = torch.arange(-window, keys.shape[1] - window, device=own.device)
            distance = place - torch.arange(window, device=own.device)[:, None]
            near = (distance >= -window) & (distance <= (0 if causal else window))
            self._block_masks[window, causal] = ((queries == keys[:, None]) & near)[:, None]
        return self._block_masks[window, causal]


def attend(qkv: Tensor, segments: Segments, window: int | None = None, causal: bool = False) -> Tensor:
    """Softmax attention within each segment.

    Args:
        qkv: `(row_len, 3, heads, head_dim)`: queries, keys and values.
        segments: the row's segments, on the device of `qkv`.
        window: how many tokens to each side a token sees; None for its whole segment.
        causal: a token sees itself and what comes before it only.

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
    # A window that reaches across every segment hides nothing.
    if window is None or window + 1 >= segments.max_seqlen:
        return _attend_by_segment(qkv, segments, causal)
    return _attend_by_block(qkv, segments, window, causal)


def _attend_by_segment(qkv: Tensor, segments: Segments, causal: bool) -> Tensor:
    """One call per segment; `split` and `cat` are one node each in the backward pass."""
    attended = []
    for part in qkv.split(segments.lengths):
        query, key, value = part.permute(1, 2, 0, 3).unsqueeze(1)  # 3 x (1, heads, length, head_dim)
        attended.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(attended)


def _attend_by_block(qkv: Tensor, segments: Segments, window: int, causal: bool) -> Tensor:
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
    """`(blocks * window, ...)` to `(blocks, 3 * window, ...)`: each block between its two neighbours.

    Causal, to `(blocks, 2 * window, ...)`: each block behind the one before it.
    """
    at_the_ends = slots.new_full((window, *slots.shape[1:]), outside)
    padded = torch.cat([at_the_ends, slots, at_the_ends]).unflatten(0, (-1, window))
    neighbourhood = [padded[:-2], padded[1:-1]] if causal else [padded[:-2], padded[1:-1], padded[2:]]
    return torch.cat(neighbourhood, dim=1)


def uses_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend` takes flash-attn's kernel for such tensors."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and flash_attn_is_installed()


@cache
def flash_attn_is_installed() -> bool:
    """Whether the optional flash-attn package can be found."""
    return importlib.util.find_spec("flash_attn") is not None


@cache
def _flash_attn() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_qkvpacked_func  # late: an optional extra

    kernel: Callable[..., Any] = flash_attn_varlen_qkvpacked_func
    return kernel


def describe_attention(device: torch.device, dtype: torch.dtype) -> str:
    """One phrase for the start of a run: the kernel in use, and why not the fast one."""
    if uses_flash(device, dtype):
        return "flash-attn, variable length"
    if device.type != "cuda":
        return "PyTorch SDPA by document (no GPU)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch SDPA by document, slow: flash-attn takes 16-bit precision only, not {dtype}"
    return "PyTorch SDPA by document, slow: flash-attn is not installed"
