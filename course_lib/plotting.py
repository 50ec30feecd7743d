"""One look for every figure of the course, and no figure without a description."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, told apart with every common kind of colour blindness; yellow is left out, too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

STYLE = {
    "figure.figsize": (6.4, 4.0),
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 14,
    "axes.titlesize": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.linewidth": 2,
}


def figure(**options: Any) -> tuple[Figure, Any]:
    """Make a figure and its axes in the course's style.

    Parameters
    ----------
    **options
        As for :func:`matplotlib.pyplot.subplots`.

    Returns
    -------
    (Figure, Axes or array of Axes)
        To be drawn on and handed to :func:`show`.
    """
    import matplotlib.pyplot as plt
    from cycler import cycler

    # For the session, not for this call alone: legends and labels read the style when they are drawn.
    plt.rcParams.update({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)})
    made, axes = plt.subplots(layout="constrained", **options)
    return made, axes


def show(made: Figure, alt: str, *, caption: str = "") -> None:
    """Display a finished figure with its text alternative and close it.

    Parameters
    ----------
    made : Figure
        From :func:`figure`.
    alt : str
        What the figure shows, for a reader who cannot see it: the message, not the colours.
    caption : str, optional
        A line below the picture.

    Raises
    ------
    ValueError
        If ``alt`` says less than a sentence would.
    """
    import matplotlib.pyplot as plt
    from IPython.display import HTML, display

    buffer = io.BytesIO()
    try:
        if not isinstance(alt, str) or len(alt.split()) < 5:
            raise ValueError(f"alt is {alt!r}; a sentence that says what the figure shows is needed")
        made.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    finally:
        plt.close(made)  # a figure left open is shown again, without description, at the end of the cell
    display(HTML(_tag(buffer.getvalue(), alt, caption)))


def _tag(png: bytes, alt: str, caption: str) -> str:
    import base64
    import html

    image = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="course-figure">{image}{below}</figure>'
