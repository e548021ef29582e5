"""Where a model with recurrent layers can be resumed: the lengths whose state SGLang keeps.

A prefix hit of such a model needs a snapshot of its recurrent state beside live windows. SGLang
takes one in every long enough prefill chunk and one every so many decoded tokens; the windows of
exactly those lengths are what a later hit can use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotGrid:
    """SGLang's rules of when it keeps a recurrent state.

    Fields: ``prefill`` tokens between possible snapshots of a chunk, counted from its start;
    ``decode`` tokens between snapshots of a decoding request, counted from 0; ``state`` tokens
    between the states that a chunk's kernel returns.
    """

    prefill: int
    decode: int
    state: int

    def of_chunk(self, start: int, end: int, branch: int | None) -> int:
        """Length whose state the chunk [start, end) leaves behind, 0 for none.

        Args:
            branch: where an earlier prefix hit had cached tokens but no state (None: nowhere);
                SGLang prefers that length to the chunk's last.
        """
        steps = (end - start) // self.prefill
        if not steps:
            return 0
        last = start + steps * self.prefill
        if branch is not None and start < branch < end and (branch - start) % self.state == 0:
            return branch
        return last

    def of_decode(self, length: int) -> bool:
        """Whether the state at ``length`` tokens is kept while decoding."""
        return length % self.decode == 0


def server_grid(page_size: int) -> SnapshotGrid:
    """The running server's grid. Precondition: the model has recurrent layers."""
    from sglang.srt.runtime_context import (
        mamba_cache_chunk_size,
        mamba_checkpoint_grid,
        mamba_track_grid,
    )

    return SnapshotGrid(
        prefill=mamba_checkpoint_grid(page_size),
        decode=mamba_track_grid(page_size),
        state=mamba_cache_chunk_size(),
    )
