"""Colours of runs, shared by the figure and the page, and distinguishable for colour-blind readers.

The first five are from Okabe and Ito, without their second blue. The others were chosen one after another, each with
the largest distance in OKLab from the earlier colours and the baseline, as seen by trichromats and by people with
deuteranopia, protanopia or tritanopia (Machado, Oliveira and Fernandes 2009). Further runs repeat the colours, darker
on a light background and lighter on a dark one. Dashes and markers also distinguish runs.
"""

LIGHT = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#780F3C", "#4B00C3", "#A500FF", "#00B4FF", "#5A5A00", "#B41E87"),
)
DARK = (
    *("#4A9DE8", "#F2854A", "#2FC79A", "#E59CC5", "#F3BC4B"),
    *("#FF3B3B", "#B41EFF", "#7869B4", "#87E1FF", "#D2F000", "#C34B78"),
)
BASELINE = ("#000000", "#FFFFFF")  # on a light and on a dark background
SHADE = 0.6  # factor of a colour's distance to black or white for each repetition of the palette


def of_run(place: int) -> tuple[str, str]:
    """Return the colours of a run on a light and on a dark background. place: its index among the runs without the
    baseline.
    """
    again, at = divmod(place, len(LIGHT))
    keep = SHADE**again
    return mixed(LIGHT[at], keep, 0), mixed(DARK[at], keep, 255)


def mixed(colour: str, share: float, end: int) -> str:
    """Mix `share` of a colour "#RRGGBB" with black (end 0) or white (end 255)."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(share * part + (1 - share) * end):02X}" for part in parts)
