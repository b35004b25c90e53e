"""Loss spikes that follow RMS spikes of AdamW's update (arXiv 2304.13013, section 3.4).

An RMS spike, an event, is a step at which RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of AdamW's update is above 2.3: the
second moment is out of date, so the update is too large. An event precedes a loss spike if it is 1 to 8 steps before
it. If events are frequent, many precede a spike by chance; the share of all steps that are 1 to 8 steps after an event
says how many.

The RMS is `optim/update_rms` of runs with `log_update_rms=true`, the largest of all matrices but the embedding. In the
paper, on vision models, it is that of the patch embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_train.tools.compare.curves import Spike
from lowprec_train.tools.compare.runs import Run

RMS = "optim/update_rms"
LARGE, AHEAD = 2.3, 8


@dataclass(frozen=True, kw_only=True)
class RmsSpikes:
    """events: number of RMS spikes; consecutive steps count as one. spikes: of the loss. preceded: loss spikes that an
    event precedes. chance: share of steps that are 1 to 8 steps after an event.
    """

    events: int
    spikes: int
    preceded: int
    chance: float


def rms_spikes(record: Run, spikes: Sequence[Spike]) -> RmsSpikes | None:
    """Count the spikes of a run; None if it has not logged the RMS."""
    series = record.series(RMS)
    if not len(series.steps):
        return None
    large = series.steps[series.values > LARGE]
    behind = {int(step) + ahead for step in large for ahead in range(1, AHEAD + 1)}
    return RmsSpikes(
        events=int(np.sum(np.diff(large, prepend=-np.inf) > 1)),
        spikes=len(spikes),
        preceded=sum(spike.step in behind for spike in spikes),
        chance=sum(int(step) in behind for step in series.steps) / len(series.steps),
    )


def merge_rms_spikes(found: Iterable[RmsSpikes | None]) -> RmsSpikes | None:
    """Add the counts of several runs; None if one has not logged the RMS."""
    each = list(found)
    known = [one for one in each if one is not None]
    if not known or len(known) < len(each):
        return None
    return RmsSpikes(
        events=sum(one.events for one in known),
        spikes=sum(one.spikes for one in known),
        preceded=sum(one.preceded for one in known),
        chance=sum(one.chance for one in known) / len(known),
    )
