"""What the wrappers of the row kernels refuse, and in which unit rows are moved."""

import torch

ROW_BYTES = 656  # one fp8_ds_mla row at the released dimensions
PAGE_ROWS = 64


def check_row_pages(pages: torch.Tensor) -> None:
    """ValueError unless pages are [num_pages, 64, 656] bytes, each contiguous and 16-byte aligned.

    The alignment is what lets a row be moved 16 bytes at a time.
    """
    if pages.dtype != torch.uint8 or pages.shape[1:] != (PAGE_ROWS, ROW_BYTES):
        raise ValueError(f"pages must be [num_pages, {PAGE_ROWS}, {ROW_BYTES}] bytes")
    if pages.stride()[1:] != (ROW_BYTES, 1):
        raise ValueError("the rows of a page must be contiguous")
    if pages.stride(0) % 16 or pages.storage_offset() % 16:
        raise ValueError("pages must begin at multiples of 16 bytes")


def check_slots(slots: torch.Tensor, num_rows: int) -> None:
    """ValueError unless there is one slot a row, as int64."""
    if slots.dtype != torch.int64 or slots.shape != (num_rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be {num_rows} contiguous int64 numbers")


def widest_word(*pages: torch.Tensor) -> torch.dtype:
    """The widest unit that all rows begin and end at; two of 8 bytes are moved at once.

    Each is bytes whose last axis is a row; ValueError if nothing of 4 bytes or more fits.
    """
    numbers = [
        n for rows in pages for n in (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    ]
    for word in (torch.int64, torch.int32):
        if all(n % word.itemsize == 0 for n in numbers):
            return word
    raise ValueError("rows and pages must be multiples of 4 bytes")
