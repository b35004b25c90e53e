"""Checkpoints that one layout of processes writes and another reads, bit for bit, with every optimizer's state."""

import pytest

from tests.parallel.resharding import CASES, LAYOUTS, READS, launched


@pytest.fixture(scope="module")
def found(once, tmp_path_factory):
    return once("resharding", lambda: launched(tmp_path_factory.mktemp("resharding")))


@pytest.mark.parametrize(("layout", "writer"), [(layout, writer) for layout, many in READS.items() for writer in many])
def test_every_tensor_is_the_part_of_the_whole(found, layout, writer):
    """Parameters, codes, scales of groups and of tensors, scalars; rank 0's memory on all ranks."""
    ranks = found[layout]
    assert len(ranks) == (LAYOUTS[layout].processes if layout in LAYOUTS else 1)
    wrong = {case: [rank[f"{case} from {writer}"] for rank in ranks] for case in CASES}
    assert wrong == {case: [[] for _ in ranks] for case in CASES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizers_of_parts_have_these_parts(found, layout):
    """What stands for an optimizer above has tensors of the names, shapes and dtypes of a true one."""
    assert {case: [rank[f"made of {case}"] for rank in found[layout]] for case in CASES} == {
        case: [[]] * LAYOUTS[layout].processes for case in CASES
    }


def test_another_model_is_refused_in_the_same_words_on_all_ranks(found):
    said = {rank["refused"] for rank in found["4x1"]}
    assert len(said) == 1
    assert "model.norm.weight: saved (16,) torch.float32, here (17,) torch.float32" in said.pop()


def test_fsdp_parameters_keep_their_names_after_a_forward_pass(found):
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    shapes = ["(5, 8)", "(5,)", "(5,)", "(5,)", "(3, 5)"]
    states = [f"{name}.exp_avg {shape}" for name, shape in zip(names, shapes, strict=True)]
    assert [rank["after a forward pass"] for rank in found["2x1"]] == [names + states] * 2
