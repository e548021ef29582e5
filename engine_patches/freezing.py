"""The host's side of a freeze: which pages go, which stay, and how many a request may still need.

Before its freeze a request holds its prompt like any other, plus compact pages from the last chunk
on; once the forward that freezes it is launched, the prompt's pages of the full level are let go,
except the page the next token goes into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_patches.freeze import Freeze
from engine_patches.ledger import PageLedger
from kvpolicy.residency import ceil_div, held_pages, peak_length
from kvpolicy.windows import Level

if TYPE_CHECKING:
    from engine_patches.residents import Resident, Residents


@dataclass(frozen=True)
class Stage:
    """A request at ``length`` tokens; ``tail`` pages of it are left on a frozen level, None while
    the level holds everything (and may share the prompt's pages with others)."""

    length: int
    tail: int | None

    def held(self, level: Level, page_size: int) -> int:
        """Logical pages a unit of ``level`` holds."""
        if self.tail is not None and level.is_full:
            return self.tail
        return held_pages(level, self.length, page_size)


def full_level(ledger: PageLedger) -> int | None:
    """The level whose units keep everything, and so can be frozen; None if there is none."""
    return next((k for k, level in enumerate(ledger.levels) if level.is_full), None)


def tail_page(freeze: Freeze, page_size: int) -> int:
    """Page index that holds position T, the first token after the prompt."""
    return freeze.prompt // page_size


def stages(freeze: Freeze | None, target: int, page_size: int) -> list[Stage]:
    """The moments at which a request that grows to ``target`` tokens may hold most."""
    top = peak_length(target, page_size)
    if freeze is None:
        return [Stage(top, None)]
    tail = max(0, ceil_div(top, page_size) - tail_page(freeze, page_size))
    after = Stage(max(top, freeze.prompt), tail)
    if freeze.done:
        return [after]
    prompt = Stage(peak_length(freeze.prompt, page_size), None)
    return [prompt, after]


def compact_ahead(residents: Residents, freeze: Freeze | None) -> int:
    """Compact pages, over all units, that are still to be taken."""
    if freeze is None or freeze.pages is not None or freeze.done:
        return 0
    return int(_page_counts(residents, freeze).sum())


def _page_counts(residents: Residents, freeze: Freeze) -> np.ndarray:
    """Compact pages of each unit that freezes: int64 [units]."""
    units = int(residents.ledger.units[full_level(residents.ledger)])
    return freeze.page_counts(units, residents.page_size)


def compact_held(freeze: Freeze | None) -> int:
    """Compact pages, over all units, that are held now."""
    return 0 if freeze is None or freeze.pages is None else freeze.pages.total


def compact_pages(residents: Residents, resident: Resident, length: int) -> int:
    """Compact pages that growing to ``length`` tokens takes."""
    freeze = resident.freeze
    return compact_ahead(residents, freeze) if freeze and length == freeze.prompt else 0


def take_compact(residents: Residents, resident: Resident) -> None:
    """Take the compact pages of a request whose prompt is complete.

    Raises:
        OutOfPages: admission let in more than the arena holds.
    """
    freeze, ledger = resident.freeze, residents.ledger
    if freeze is None or freeze.done or resident.length < freeze.prompt:
        return
    if resident.length != freeze.prompt:
        raise RuntimeError(f"a chunk ran past position {freeze.prompt}, where the prompt freezes")
    counts = _page_counts(residents, freeze)
    residents.make_room(int(counts.sum()))
    freeze.pages = ledger.take(full_level(ledger), counts)
    slots = (*freeze.pages.ids.shape[:1], freeze.pages.ids.shape[1] * residents.page_size)
    freeze.kept_positions = torch.full(slots, -1, dtype=torch.int64, device=ledger.device)


def drop_compact(residents: Residents, resident: Resident) -> None:
    """The request is over: its compact pages are free."""
    freeze = resident.freeze
    if freeze is not None and freeze.pages is not None:
        residents.ledger.give_back(freeze.pages)
        freeze.pages = None


def settle(residents: Residents, resident: Resident) -> None:
    """The forward that freezes ``resident`` was launched: let its prompt's full pages go.

    Side effect: pages that nobody else holds stay as evictable cache, the end of the prompt first
    in the queue, or are freed where nothing is cached.
    """
    freeze, ledger = resident.freeze, residents.ledger
    k, first = full_level(ledger), tail_page(freeze, residents.page_size)
    loose = ledger.release(k, residents.ids(resident, range(first)))
    if residents.cache:
        ledger.retain(k, loose[::-1])
    else:
        ledger.release_pages(k, loose)
    resident.first[k] = first
    freeze.done = True


def trim(residents: Residents, resident: Resident) -> int | None:
    """Free compact pages beyond what was kept, once the device has told; kept entries, or None."""
    freeze = resident.freeze
    if freeze is None or not freeze.done or freeze.pages is None:
        return None
    counts = freeze.trim_counts()
    if counts is None:
        return None
    residents.ledger.trim(freeze.pages, -(-counts // residents.page_size))
    return int(counts.sum())
