"""A prepared upsampler: what remains once the image and the features have fixed the weights of every mixture.

All upsamplers here are linear in the feature map with weights that sum to 1 at each output pixel. So whatever is
affine in the features (principal components, class scores, dot products) is computed on the small grid and sent
through the same operator in a few channels, exactly. Knows nothing of images and models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from backend.errors import BadRequest, OutOfMemory
from backend.features.checks import check_numbers
from backend.types import Tick, no_tick

DEFAULT_BUDGET = 1 << 30  # bytes of working memory beside the result, where the caller names no budget


class Operator(ABC):
    """Weights from an h × w grid to H × W output pixels, for a batch of B images.

    Attributes:
        grid: (h, w).
        size: (H, W).
        batch: B.
        device: Where the weights are.
        step: Output rows are best asked for in multiples of this.
        notes: Things the reader must know about these weights.
    """

    grid: tuple[int, int]
    size: tuple[int, int]
    batch: int
    device: torch.device
    step: int = 1
    notes: tuple[str, ...] = ()

    @abstractmethod
    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return output rows ``start`` to ``stop``.

        Args:
            values: (B, K, h, w) of any number of channels K.
            start: First row.
            stop: Last row + 1.

        Returns:
            (B, stop - start, W, K), channels last.
        """

    @abstractmethod
    def row_bytes(self, channels: int) -> int:
        """Return the working memory that one output row takes, in bytes, its result included."""

    @property
    def nbytes(self) -> int:
        """Memory that the operator itself holds, in bytes."""
        return 0

    def chunks(self, channels: int, budget: int | None = None, rows: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of chunks of output rows that fit a memory budget. The result never depends on it.

        Args:
            channels: Number of value channels K.
            budget: Bytes of working memory; None for 1 GiB.
            rows: Fixed number of rows instead.

        Raises:
            OutOfMemory: If one row needs more than the budget.
        """
        if rows is None:
            budget = DEFAULT_BUDGET if budget is None else budget
            need = max(1, self.row_bytes(channels))
            rows = budget // need
            if rows < 1:
                raise OutOfMemory(
                    f"One row of the result needs {need / 1e9:.2f} GB, the budget is {budget / 1e9:.2f} GB.",
                    "Raise the memory budget or choose a smaller output.",
                )
            rows = rows // self.step * self.step or rows
        for start in range(0, self.size[0], rows):
            yield start, min(start + rows, self.size[0])

    def apply(
        self,
        values: Tensor,
        *,
        budget: int | None = None,
        rows: int | None = None,
        out: Tensor | None = None,
        tick: Tick = no_tick,
    ) -> Tensor:
        """Upsample a map of any number of channels.

        Args:
            values: (B, K, h, w), finite.
            budget: Bytes of working memory beside the result; chooses the chunks.
            rows: Output rows per chunk, instead of a budget.
            out: (B, K, H, W) to write into, e.g. a memory-mapped file.
            tick: Called after every chunk; may raise to cancel.

        Returns:
            (B, K, H, W), float32 (float64 for float64 values).

        Raises:
            BadRequest: If the values do not lie on this operator's grid.
        """
        self.check(values)
        channels = values.shape[1]
        dtype = values.dtype if values.dtype.itemsize >= 4 else torch.float32
        if out is None:
            out = torch.empty(self.batch, channels, *self.size, device=values.device, dtype=dtype)
        for start, stop in self.chunks(channels, budget, rows):
            out[:, :, start:stop] = self.rows(values, start, stop).movedim(3, 1)
            tick(stop, self.size[0])
        return out

    def check(self, values: Tensor) -> None:
        """Check that a map lies on this operator's grid.

        Raises:
            BadRequest: If shape, device or numbers do not fit.
        """
        if values.ndim != 4 or values.shape[0] != self.batch or tuple(values.shape[2:]) != self.grid:
            raise BadRequest(
                f"The map to upsample has shape {tuple(values.shape)}; "
                f"this operator takes ({self.batch}, K, {self.grid[0]}, {self.grid[1]}).",
                "Prepare the operator again for this map.",
            )
        if values.device != self.device:
            raise BadRequest(f"The map is on {values.device}, the operator on {self.device}.", "Move the map.")
        check_numbers(values, "map to upsample")

    def reads(self, row: int, column: int, image: int = 0) -> Tensor:
        """Return the weights (h, w) with which one output pixel reads the grid; they sum to 1.

        Raises:
            BadRequest: If the pixel lies outside the output.
        """
        if not (0 <= row < self.size[0] and 0 <= column < self.size[1] and 0 <= image < self.batch):
            raise BadRequest(f"Pixel ({row}, {column}) lies outside the {self.size[0]} × {self.size[1]} output.")
        cells = self.grid[0] * self.grid[1]
        basis = torch.eye(cells, device=self.device).view(1, cells, *self.grid).expand(self.batch, -1, -1, -1)
        return self.rows(basis, row, row + 1)[image, 0, column].view(self.grid)
