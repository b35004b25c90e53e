"""What a rank does in the tests of collectives: every case, one after the other."""

import shutil
import tempfile

import torch
import torch.distributed as dist

from lowprec_train.comm import collectives
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.comm.shared_scale import MuSchedule, SharedScaleCodec
from lowprec_train.comm.symmetric_memory import SymmetricRows
from tests.comm.cases import CASES, RANKS, ROW, Case, gradients, of_two_ranks

SIZE = 1 << 16  # bytes of a buffer that all ranks read, enough for every case


class RowsInFiles:
    """`PeerRows` of processes of a group: a file for each rank, which all of them map. turns: what was called."""

    def __init__(self, size, group, device):
        self.group, self.rank, self.turns = group or dist.group.WORLD, dist.get_rank(group), []
        folder = [tempfile.mkdtemp()] if self.rank == 0 else [None]
        dist.broadcast_object_list(folder, group=self.group, group_src=0)
        names = [f"{folder[0]}/{rank}" for rank in range(self.group.size())]
        self.buffers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(folder[0])  # what is mapped stays

    def to_write(self, row_bytes):
        dist.barrier(self.group)
        self.turns.append("write")
        mine = self.buffers[self.rank]
        mine.fill_(7)
        return mine[: len(self.buffers) * row_bytes].view(-1, row_bytes)

    def to_read(self, row_bytes):
        dist.barrier(self.group)
        self.turns.append("read")
        first = self.rank * row_bytes
        return [each[first : first + row_bytes][None] for each in self.buffers]


def run(case, rank, device="cpu", **more):
    """This rank's result, on the CPU."""
    collective, mu = getattr(collectives, case.kind), torch.tensor(case.mu, device=device)
    found = collective(case.given(rank, device), None, case.codec, case.layout, mu=mu, **more)
    return found.total.cpu() if found.at_maximum is None else (found.total.cpu(), share(found, case).cpu())


def share(found, case):
    """Of all ranks' codes, those at the maximum."""
    rows = len(case.flats) if case.kind == "reduce_scatter" else 1
    count = DistributedGroup.of(None).all_reduce_sum(found.at_maximum.double())
    return count.float() / max(1, rows * case.layout.coded_size)


def scheduled(rank, steps=6):
    """mu and the share at the maximum, step by step, of identical gradients from mu = 1 on."""
    schedule, history = MuSchedule(RANKS), []
    schedule.load_state_dict({"level": torch.tensor(0)})
    flat = gradients(RANKS * ROW.size)[0]
    for _ in range(steps):
        mu = schedule.mu
        case = Case("reduce_scatter", SharedScaleCodec(), [flat] * RANKS)
        of_codes = share(collectives.reduce_scatter(flat, None, case.codec, ROW, mu=mu), case)
        schedule.update(of_codes)
        history.append(torch.stack((mu, of_codes)))
    return torch.stack(history)


def refusals():
    """The messages of what must be refused: sizes that do not fit."""
    messages = []
    for kind, size in (("reduce_scatter", RANKS * ROW.size), ("all_reduce", ROW.size)):
        for options in ({"short": 1}, {"out": torch.zeros(3)}):
            options = dict(options)
            flat = torch.zeros(size - options.pop("short", 0))
            try:
                getattr(collectives, kind)(flat, None, BlockScaledCodec(), ROW, **options)
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
    return messages


def subgroups(rank):
    """Two ranks each, where whole contributions are summed; and one rank alone, where nothing is rounded."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    case = CASES["all_reduce-e4m3"]
    flat = case.flats[rank]
    return {
        "pair": collectives.all_reduce(flat, pairs[rank // 2], case.codec, ROW).total,
        "alone": collectives.all_reduce(flat, alone, case.codec, ROW).total,
        "alone-scattered": collectives.reduce_scatter(flat, alone, case.codec, ROW).total,
        "alone-shared": collectives.reduce_scatter(flat, alone, SharedScaleCodec(), ROW, mu=torch.tensor(1.0)).total,
    }


def of_own_scales(cases):
    """The reduce-scatters that may read what other ranks have encoded, by name."""
    return {
        name: case for name, case in cases.items() if case.kind == "reduce_scatter" and not case.codec.shares_scales
    }


def from_peers(rank):
    """(results of `of_own_scales` from files that all ranks map, whether each read them), {case: pair}."""
    peers, found = RowsInFiles(SIZE, None, "cpu"), {}
    for name, case in of_own_scales(CASES).items():
        before = len(peers.turns)
        result = run(case, rank, peers=peers)
        found[name] = result, peers.turns[before:]
    return found


def work(rank):
    """Over gloo, on RANKS ranks: {case: result}."""
    results = {name: run(case, rank) for name, case in CASES.items()}
    results |= {"from peers": from_peers(rank), "schedule": scheduled(rank), "refusals": refusals()}
    return results | subgroups(rank)


def in_symmetric_memory(rank):
    """On two GPUs: {case: (result, results of three replays of a graph, with gradients doubled before the last)}."""
    device = torch.device("cuda", rank)
    rows, found = SymmetricRows(SIZE, None, device), {}
    for name, case in of_own_scales({name: of_two_ranks(case) for name, case in CASES.items()}).items():
        result, given = run(case, rank, device=device, peers=rows), case.given(rank, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = collectives.reduce_scatter(given, None, case.codec, case.layout, peers=rows).total
        replays = []
        for last in (False, False, True):
            for each in [given] if isinstance(given, torch.Tensor) else given:
                each.mul_(2.0 if last else 1.0)
            graph.replay()
            replays.append(total.cpu())
        found[name] = result, replays
    return found


def work_on_gpu(rank):
    """On two ranks: the cases, and their all-reduces once more in two steps, which two ranks would not choose."""
    device = torch.device("cuda", rank)
    cases = {name: of_two_ranks(case) for name, case in CASES.items()}
    results = {name: run(case, rank, device=device) for name, case in cases.items()}
    BlockScaledCodec.sends_whole = lambda *_: False
    return results | {
        f"{name}-two-steps": run(case, rank, device=device) for name, case in cases.items() if case.kind == "all_reduce"
    }
