"""Where a yes turns into a no: the search behind every largest batch and longest prompt."""

from __future__ import annotations

from collections.abc import Callable


def boundary(fits: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """Largest n in ``low..high`` that fits, if whatever is smaller than one that fits fits too.

    The search starts beside ``guess`` and doubles its steps away from it, then halves: a guess that
    is right costs two probes, one that is off by d about 2 log2(d). ``fits`` is asked about each n
    at most once, only about ``low + 1 .. high``; ``low`` is taken to fit without being asked.

    Raises:
        ValueError: ``high`` is below ``low``.
    """
    if high < low:
        raise ValueError(f"nothing lies in {low}..{high}")
    good, bad = low, high + 1
    probe, step = min(max(guess, low + 1), high), 1
    while bad - good > 1 and good < probe < bad:
        if fits(probe):
            good, probe = probe, min(probe + step, bad - 1)
            if bad <= high:  # it fell to a good one: the rest is between the two
                break
        else:
            bad, probe = probe, max(probe - step, good + 1)
            if good > low:
                break
        step *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
