"""The shipped optimizer bundles build what they say, and each codec is a word on the command line."""

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.train import build, build_optimizer
from tests.optim.cases import BUNDLES, MASTERS, MOMENTS, adamw, fill, model


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        return OmegaConf.to_object(compose("train", overrides=list(overrides)))


def codecs(run):
    optim = run.optim
    return tuple(build.construct(node) for node in (optim.first_moment, optim.second_moment, optim.master))


def test_every_file_is_known():
    assert set(config.choices("optim")) == set(BUNDLES) | {"muon", "apex_adamw"}
    assert set(config.choices("optim/moment")) == set(MOMENTS)
    assert set(config.choices("optim/master")) == set(MASTERS)


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles(name):
    run = composed(f"optim={name}")
    first, second, master = BUNDLES[name]
    assert codecs(run) == (MOMENTS[first], MOMENTS[second], MASTERS[master])
    assert run.optim.clip_updates == (name == "stable_adamw")


def test_bundles_differ_in_their_codecs_only():
    def rest(name):
        optim = vars(composed(f"optim={name}").optim)
        return {key: value for key, value in optim.items() if key not in ("first_moment", "second_moment", "master")}

    plain = rest("adamw")
    assert all(rest(name) == plain | {"clip_updates": name == "stable_adamw"} for name in BUNDLES)


@pytest.mark.parametrize("name", MOMENTS)
def test_a_moment_on_the_command_line(name):
    run = composed(f"optim/moment@optim.first_moment={name}", f"optim/moment@optim.second_moment={name}")
    assert codecs(run) == (MOMENTS[name], MOMENTS[name], MASTERS["fp32"])


@pytest.mark.parametrize("name", MASTERS)
def test_a_master_on_the_command_line(name):
    assert codecs(composed(f"optim/master={name}", "optim=adamw_coat"))[2] == MASTERS[name]


def test_the_optimizer_takes_the_runs_values():
    run = composed("optim=adamw_fp8lm", "optim.lr=0.5", "optim.beta2=0.97", "optim.weight_decay=0.3", "seed=77")
    built, by_hand = model(), model()
    optimizer = build_optimizer.optimizer(run, built)
    same = adamw(
        [{"params": [by_hand[0].weight, by_hand[2].weight], "weight_decay": 0.3, "indexed": [0]}]
        + [{"params": [by_hand[1].weight, by_hand[1].bias, by_hand[2].bias], "weight_decay": 0.0}],
        lr=0.5,
        betas=(0.9, 0.97),
        eps=1e-8,
        moments=(MOMENTS["e4m3"], MOMENTS["fp16"]),
        master=MASTERS["fp16_nearest"],
        seed=77,
    )
    for step in range(2):
        fill(built, step), fill(by_hand, step)
        optimizer.step(), same.step()
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), by_hand.parameters(), strict=True))


@pytest.mark.parametrize(("seed", "equal"), [(77, True), (78, False)])
def test_the_runs_seed_reaches_the_masters(seed, equal):
    left, right = model(), model()
    for net, value in ((left, 77), (right, seed)):
        optimizer = build_optimizer.optimizer(composed("optim/master=bf16", f"seed={value}"), net)
        fill(net, 0)
        optimizer.step()
    assert torch.equal(left[2].weight, right[2].weight) == equal


def test_a_wrong_codec_is_a_value_error():
    with pytest.raises(ValueError, match="E2M1"):
        build_optimizer.optimizer(
            composed("optim/moment@optim.first_moment=e4m3", "optim.first_moment.format=E2M1"), torch.nn.Linear(2, 2)
        )
