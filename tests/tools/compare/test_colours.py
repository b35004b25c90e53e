"""Colours of runs: as many as runs, apart from each other for every reader, and seen on their ground."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lowprec_train.tools.compare import colours

GROUNDS = {"light": "#ffffff", "dark": "#181c22"}
# how linear sRGB is seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)
SEEN = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(colour):
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    """Ottosson 2020, of linear sRGB."""
    to_cones = [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]]
    to_lab = [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ np.clip(rgb, 0, 1))


def luminance(colour):
    return linear(colour) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(
    ("seen", "least"), [("normal", 0.12), ("deuteranopia", 0.05), ("protanopia", 0.05), ("tritanopia", 0.05)]
)
@pytest.mark.parametrize("ground", [0, 1])
def test_eleven_runs_and_the_baseline_are_apart(seen, least, ground):
    """In OKLab, where 0.02 is what one just sees side by side; Okabe and Ito's own set comes down to 0.07."""
    shown = [colours.of_run(place)[ground] for place in range(11)] + [colours.BASELINE[ground]]
    places = np.array([oklab(np.array(SEEN[seen]) @ linear(each)) for each in shown])
    apart = np.linalg.norm(places[:, None] - places, axis=2) + np.eye(len(places))
    assert apart.min() > least


def test_no_two_runs_have_one_colour():
    for ground in (0, 1):
        shown = {colours.of_run(place)[ground] for place in range(33)} | {colours.BASELINE[ground]}
        assert len(shown) == 34


@pytest.mark.parametrize(("ground", "least"), [("light", 2.1), ("dark", 3.5)])
def test_colours_stand_out_from_their_ground(ground, least):
    for place in range(22):
        a, b = sorted((luminance(colours.of_run(place)[ground == "dark"]), luminance(GROUNDS[ground])))
        assert (b + 0.05) / (a + 0.05) > least, place
