"""The twin of csrc/include/kvloom/best_outputs.hpp: what is kept of rows of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

PANEL_OUTPUTS = 32


def keep_best(rows: F32) -> tuple[F32, NDArray[np.int64]]:
    """Of each panel of 32 outputs the greatest, NaN if one of them is, and its place there.

    Both are [num_rows, num_panels].
    """
    num_rows, num_outputs = rows.shape
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    padded = np.full((num_rows, num_panels * PANEL_OUTPUTS), -np.inf, np.float32)
    padded[:, :num_outputs] = rows
    panels = padded.reshape(num_rows, num_panels, PANEL_OUTPUTS)
    return panels.max(axis=2), panels.argmax(axis=2)


def read_best(rows: F32) -> tuple[F32, NDArray[np.int32]]:
    """The same from rows in which the library has kept it."""
    num_panels = -(-rows.shape[1] // PANEL_OUTPUTS)
    kept = np.ascontiguousarray(rows[:, : 2 * num_panels])
    return kept[:, :num_panels], kept[:, num_panels:].view(np.int32)


def write_best(rows: F32) -> F32:
    """Rows as the library keeps them; what it does not write is NaN."""
    greatest, lanes = keep_best(rows)
    num_panels = greatest.shape[1]
    kept = np.full_like(rows, np.nan)
    kept[:, :num_panels] = greatest
    kept[:, num_panels : 2 * num_panels] = lanes.astype(np.int32).view(np.float32)
    return kept
