import numpy as np

from composer_packing.packing.document_table import BLOCK, NO_ROW, DocumentArrays
from composer_packing.packing.layout import fill_rows, lay_out
from tests.tools.tables import table


def test_the_picture_in_the_docstring_is_what_happens() -> None:
    documents = table([3, 1, 1, 2])
    layout = lay_out(documents, np.arange(4), np.array([1, NO_ROW, 1, 0]), row_len=4)
    tokens = np.array([*map(ord, "aaabcdd")] + BLOCK * [0])
    ids, mask = np.zeros((2, 2, 4), np.int64)
    fill_rows(DocumentArrays(tokens, np.empty(0, np.uint8), documents), layout, ord("."), ids, mask)
    assert ["".join(map(chr, row)) for row in ids.tolist()] == ["dd..", "aaac"]
    assert layout.left.tolist() == [1]


def test_a_layout_puts_documents_in_the_order_of_their_rows_and_makes_padding_a_segment() -> None:
    documents = table([3, 1, 1, 2])
    layout = lay_out(documents, np.arange(4), np.array([1, -1, 1, 0]), row_len=4)
    assert layout.documents.tolist() == [3, 0, 2]
    assert layout.first.tolist() == [0, 1, 3]
    assert layout.num_tokens.tolist() == [2, 4]
    assert layout.cu_seqlens.tolist() == [0, 2, 4, 0, 3, 4]
    assert layout.cu_seqlens.dtype == np.int32
    assert layout.segments.tolist() == [3, 3]
    assert layout.max_seqlen.tolist() == [2, 3]
    assert layout.left.tolist() == [1]


def test_the_padding_may_be_the_longest_segment() -> None:
    assert lay_out(table([3]), np.arange(1), np.array([0]), row_len=9).max_seqlen.tolist() == [6]


def test_a_layout_tells_how_long_documents_waited_and_how_far_they_moved() -> None:
    documents = table([1, 1, 1])
    documents["batch"] = [2, 5, 4]
    layout = lay_out(documents, np.array([2, 0, 1]), np.array([0, 1, 0]), row_len=2, batch=6, emitted=0)
    assert layout.documents.tolist() == [2, 1, 0]
    assert layout.longest_wait == 6 - 2
    assert layout.displacement == 2 + 0 + 2


def test_rows_are_filled_with_documents_end_to_end() -> None:
    documents = table([3, 1, 1, 2])
    layout = lay_out(documents, np.arange(4), np.array([0, -1, 0, 1]), row_len=4)
    tokens = np.array([11, 12, 13, 99, 21, 31, 32] + BLOCK * [0])
    ids, mask = np.zeros((2, 2, 4), np.int64)
    fill_rows(DocumentArrays(tokens, np.empty(0, np.uint8), documents), layout, 7, ids, mask)
    assert ids.tolist() == [[11, 12, 13, 21], [31, 32, 7, 7]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
