"""Figures: the one module that knows matplotlib, and does without it.

The colours are Okabe and Ito's and one of Tol's, which stay apart for every
kind of colour vision. Neighbours differ in lightness, so that solid bars stay
apart in print, too. Lines have markers; a hatch only marks colours that repeat.
"""

from collections.abc import Callable, Sequence
import dataclasses
import io
import pathlib
import re
import textwrap
from typing import Any

from experiments.reporting import files

try:
  import matplotlib
  import matplotlib.figure
  import matplotlib.patheffects
  import matplotlib.ticker
except ImportError:
  matplotlib = None  # type: ignore[assignment]

GREY, ORANGE, VERMILLION, SKY = '#767676', '#E69F00', '#D55E00', '#56B4E9'
BLUE, PURPLE, PLUM, GREEN = '#0072B2', '#CC79A7', '#882255', '#009E73'
COLORS = (GREY, ORANGE, VERMILLION, SKY, BLUE, PURPLE, PLUM, GREEN)
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
# Of lines whose colour came before.
_DASHES = ('-', '--', ':')
# Sparse, and no dots: those would be thousands of circles in a page.
_HATCHES = ('', '/', '\\')

# A longer name goes on in a second line, and ends there.
_NAME_WIDTH = 24

# A name may hold dollars, and is no formula then.
_PLAIN = {'text.parse_math': False}

MISSING = 'matplotlib is not installed (pip install matplotlib)'
# Stand for the colours of the page that a figure is a part of.
_INK, _PAPER = '#010203', '#fdfefc'

Figure = Any  # a matplotlib.figure.Figure


@dataclasses.dataclass(frozen=True)
class Look:
  """How one of several series is told from the others."""

  color: str
  marker: str
  hatch: str
  dashes: str


def looks(names: Sequence[str]) -> dict[str, Look]:
  """A look each; beyond eight, colours come again with all else changed."""
  count = len(COLORS)
  return {
    name: Look(
      COLORS[i % count],
      MARKERS[(i + i // count) % count],
      _HATCHES[i // count % len(_HATCHES)],
      _DASHES[i // count % len(_DASHES)],
    )
    for i, name in enumerate(dict.fromkeys(names))
  }


def label(name: str) -> str:
  """A name as it stands at an axis or in a legend: in two lines at most."""
  first, *more = textwrap.wrap(name, _NAME_WIDTH) or ['']
  if len(more) > 1:
    more = [more[0][: _NAME_WIDTH - 1] + '…']
  return '\n'.join([first, *more])


def are_possible() -> bool:
  """Whether matplotlib is there."""
  return matplotlib is not None


def new(width: float, height: float) -> Figure:
  """An empty figure of so many inches."""
  return matplotlib.figure.Figure((width, height), layout='constrained')


def ink() -> Any:
  """The colour of lines and letters; in a page the page's own."""
  return matplotlib.rcParams['text.color']


def paper() -> Any:
  """The colour behind all."""
  return matplotlib.rcParams['figure.facecolor']


def halo() -> list[Any]:
  """Returns the effects of a thin line that shows over dark bars as well."""
  around = matplotlib.patheffects.withStroke(linewidth=2.4, foreground=paper())
  return [around]


def style(axes: Any) -> None:
  """Leaves out the frame on two sides, as all figures do."""
  axes.spines[['top', 'right']].set_visible(False)


def count_by_thousands(axis: Any) -> None:
  """Labels an axis with 20k instead of 20000."""
  axis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=''))


def count_by_ones(axis: Any) -> None:
  """Labels an axis with whole numbers alone."""
  axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def written(*names: str) -> str:
  """The names of files that were written, without figures if there are none."""
  there = [x for x in names if are_possible() or not x.endswith('.png')]
  return ' and '.join(filter(None, (', '.join(there[:-1]), there[-1])))


def write_png(path: pathlib.PurePath, draw: Callable[[], Figure]) -> None:
  """Writes what `draw` returns; without matplotlib says that it is left out."""
  if not are_possible():
    print(f'{path.name} is left out: {MISSING}')
    return
  image = io.BytesIO()
  with matplotlib.rc_context(_PLAIN):
    draw().savefig(image, format='png', dpi=150)
  files.write(path, image.getvalue())


def to_svg(draw: Callable[[], Figure], name: str) -> str:
  """What `draw` returns as an element of a page, in the page's own colours.

  Args:
    draw: makes the figure, with `ink` and `paper` where it is black on white.
    name: a word that no other figure of the page has.
  """
  image = io.StringIO()
  settings = _PLAIN | {
    'axes.edgecolor': _INK,
    'axes.facecolor': _PAPER,
    'axes.labelcolor': _INK,
    'axes.titlecolor': _INK,
    'figure.facecolor': _PAPER,
    'font.family': 'sans-serif',
    'hatch.linewidth': 0.6,
    'svg.fonttype': 'none',
    'svg.hashsalt': name,
    'text.color': _INK,
    'xtick.color': _INK,
    'ytick.color': _INK,
  }
  # Else the file says when it was made, and by what.
  nothing = dict.fromkeys(('Creator', 'Date', 'Format', 'Type'))
  with matplotlib.rc_context(settings):
    draw().savefig(image, format='svg', metadata=nothing)
  svg = image.getvalue()
  svg = svg[svg.index('<svg') :].rstrip()
  svg = svg.replace(_INK, 'currentColor').replace(_PAPER, 'var(--paper)')
  # Ids are the page's, where every figure has a figure_1.
  of_figure = lambda tag: re.sub(
    r'( id="|url\(#|href="#)', rf'\g<1>{name}-', tag[0]
  )
  return re.sub('<[^<>]*>', of_figure, svg)
