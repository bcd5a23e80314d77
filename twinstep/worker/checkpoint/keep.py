"""Which checkpoints stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinstep.worker.checkpoint.manifest import Manifest

HIGHER_IS_BETTER = frozenset({"auc"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """How many are wanted."""

    last: int = 2
    """Newest ones."""
    best: int = 0
    """Those with the best scores, besides."""
    metric: str = "ne"
    """Held-out score by which they are the best."""

    def better(self, score: float, than: float) -> bool:
        """Say whether a score is better than another."""
        return score > than if self.metric in HIGHER_IS_BETTER else score < than


def to_remove(found: Mapping[str, Manifest], broken: Sequence[tuple[int, str]], keep: Keep) -> list[str]:
    """Return the names of directories that are to go, the oldest first.

    Args:
        found: whole checkpoints by name.
        broken: number and name of those without a sound manifest; they go once a newer one is whole.
    """
    newest_first = sorted(found, key=lambda name: found[name].number, reverse=True)
    scored = [name for name in newest_first if math.isfinite(found[name].scores.get(keep.metric, math.nan))]
    sign = -1 if keep.metric in HIGHER_IS_BETTER else 1
    best = sorted(scored, key=lambda name: sign * found[name].scores[keep.metric])[: keep.best]
    stay = {*newest_first[: max(1, keep.last)], *best}
    newest = max((each.number for each in found.values()), default=-1)
    gone = [(found[name].number, name) for name in newest_first if name not in stay]
    gone += [(number, name) for number, name in broken if number < newest]
    return [name for _, name in sorted(gone)]
