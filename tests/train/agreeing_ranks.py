"""What a rank does in the tests of stop requests: all cases in one go."""

import time

import torch.distributed as dist

from lowprec_train.train.stop_consensus import StopConsensus

RANKS = 3
STEPS = 6
# {case: {rank: first step after which it asks}}
ASKED = {
    "nobody": {},
    "one": {2: 2},
    "all": {0: 3, 1: 3, 2: 3},
    "apart": {0: 4, 1: 2},
    "at-once": {1: 0},
    "late": {0: 5},
}
SIGNALS = (10, 12, 15)
DELAY = 0.25  # seconds that the straggler comes late


def stops(group, rank, asked):
    """The number of steps made when the decision fell (None: it did not), and the signal learned."""
    consensus = StopConsensus(group)
    made = None
    for step in range(STEPS):
        request = SIGNALS[rank] if step >= asked.get(rank, STEPS) else 0
        if consensus.agree(request):
            made = step + 1
            break
    consensus.close()
    return made, consensus.learned


def stragglers(group, rank):
    """Metrics after steps in which rank 1 comes late, each rank with times of its own."""
    consensus = StopConsensus(group)
    seen = [consensus.metrics()]
    for step in range(4):
        dist.barrier(group)
        time.sleep(DELAY if rank == 1 else 0.0)
        consensus.agree(False, step_ms=100.0 * step + rank, data_ms=float(rank))
        seen.append(consensus.metrics())
    consensus.close()
    return seen


def unhurried(group, rank):
    """Seconds that agreeing took ranks 0 and 1 in a step in which rank 2 comes late, and in the step after it."""
    consensus = StopConsensus(group)
    consensus.agree(False)
    dist.barrier(group)
    took = []
    for _ in range(2):
        time.sleep(DELAY if rank == 2 else 0.0)
        begin = time.perf_counter()
        consensus.agree(False)
        took.append(time.perf_counter() - begin)
    consensus.close()
    return took


def work(rank):
    group, barriers = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    results = {name: stops(group, rank, asked) for name, asked in ASKED.items()}
    results |= {"stragglers": stragglers(group, rank), "unhurried": unhurried(group, rank)}
    dist.barrier(barriers)
    return results
