"""What ranks compare before they begin, and how many of them say what they all have to say."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lowprec_train.train import rendezvous
from lowprec_train.train.launch import World
from lowprec_train.train.rendezvous import Rendezvous

SAME = {"max_grad_norm": 1.0, "name": "a", "parallel.timeout_minutes": 10.0}


def outcomes(made):
    """What `agreed` gives each rank, where rank i makes made[i], a mapping or an exception to raise."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def make(value):
        if isinstance(value, Exception):
            raise value
        return value

    def one(rank):
        of_rank = Rendezvous(World(rank, len(made)), store)
        try:
            return rendezvous.agreed(of_rank, lambda: make(made[rank]), lambda value: value)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(made)) as threads:
        return list(threads.map(one, range(len(made))))


def test_ranks_that_agree_go_on():
    assert outcomes([SAME, dict(reversed(SAME.items())), SAME]) == [SAME] * 3
    assert outcomes([SAME | {"data.cache": f"/scratch/{rank}"} for rank in range(3)])[2]["data.cache"] == "/scratch/2"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm: 1.0 on ranks 0 and 2-3; 0.5 on rank 1"),
        ({"name": "b"}, "name: a on ranks 0 and 2-3; b on rank 1"),
        ({"parallel.timeout_minutes": 0.5}, "parallel.timeout_minutes: 10.0 on ranks 0 and 2-3; 0.5 on rank 1"),
        ({"torch": "2.11.0"}, "torch: (absent) on ranks 0 and 2-3; 2.11.0 on rank 1"),
    ],
)
def test_one_rank_differs(changes, line):
    """All ranks raise the same error, with the key, the values and the ranks."""
    errors = outcomes([SAME, SAME | changes, SAME, SAME])
    assert all(isinstance(error, ValueError) for error in errors) and len(set(map(str, errors))) == 1
    assert str(errors[0]) == f"the ranks of this run were started with different configurations:\n  {line}"


def test_long_lists_end():
    text = str(outcomes([{f"key{i}": rank for i in range(9)} for rank in range(2)])[0])
    assert len(text.splitlines()) == 6 and text.endswith("and 5 more")


def test_an_error_of_one_rank_is_that_of_all():
    mistake = ValueError("steps=0 must be at least 1")
    errors = outcomes([SAME, mistake, SAME])
    assert [str(error) for error in errors] == [f"{mistake} (rank 1 only)"] * 3
    assert [str(error) for error in outcomes([mistake, ValueError(str(mistake))])] == [str(mistake)] * 2
    bug = TypeError("no such thing")
    errors = outcomes([SAME, bug])
    assert errors[1] is bug and str(errors[0]) == "no such thing (rank 1 only)"


def test_ranks_that_do_not_come():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(ValueError, match="ranks 1-2 did not join the run in time"):
        rendezvous.compared(Rendezvous(World(0, 3), store), {"facts": {}})
    with pytest.raises(ValueError, match="rank 0 did not report"):
        rendezvous.compared(Rendezvous(World(1, 3), dist.PrefixStore("other", store)), {"facts": {}})


def test_what_all_have_to_say_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.2)
    store = dist.HashStore()
    for rank, text in ((0, "out of memory: 3 GiB of 80"), (1, "out of memory: 4 GiB of 80"), (2, "no such file")):
        Rendezvous(World(rank, 3), store).report(text)
    assert capsys.readouterr().err.splitlines() == [
        "error: out of memory: 3 GiB of 80",
        "error on rank 2: no such file",
    ]


def test_names_of_ranks():
    assert [rendezvous.numbered(each) for each in ([3], [0, 1], [5, 0, 1, 2], [1, 3, 5])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-2 and 5",
        "ranks 1, 3 and 5",
    ]
