"""Figures: the only module that uses matplotlib, and it works without it.

The colours are Okabe and Ito's and one of Tol's, which can be told apart with
every kind of colour vision. Neighbours differ in lightness, so that solid bars
can be told apart in print, too. Lines have markers; hatches only mark colours
that repeat.
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
# The width of every figure in inches, 600 pixels on a screen.
WIDTH = 6.25
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
# For lines whose colour has been used before.
_DASHES = ('-', '--', ':')
# Sparse, and without dots, which would be thousands of circles in a page.
_HATCHES = ('', '/', '\\')

# A longer name continues on a second line, where it is cut off.
_NAME_WIDTH = 24
_TITLE_WIDTH = 90

# A name may contain dollar signs without being a formula.
_PLAIN = {'text.parse_math': False}

MISSING = 'matplotlib is not installed (pip install matplotlib)'
# Placeholders for the colours of the page that contains a figure.
_INK, _PAPER = '#010203', '#fdfefc'

Figure = Any  # a matplotlib.figure.Figure


@dataclasses.dataclass(frozen=True)
class Look:
  """The marks that tell one of several series from the others."""

  color: str
  marker: str
  hatch: str
  dashes: str

  @property
  def line(self) -> dict[str, Any]:
    """Settings of `Axes.plot` for marks that are joined by a line."""
    return self.mark | {'linestyle': self.dashes}

  @property
  def mark(self) -> dict[str, Any]:
    """Settings of `Axes.plot` for a mark alone."""
    return {'color': self.color, 'marker': self.marker, 'linestyle': 'none'}


def looks(names: Sequence[str]) -> dict[str, Look]:
  """Returns a look per name; after eight, colours repeat with other marks."""
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
  """Returns a name for an axis or a legend, in at most two lines."""
  first, *more = textwrap.wrap(name, _NAME_WIDTH) or ['']
  if len(more) > 1:
    more = [more[0][: _NAME_WIDTH - 1] + '…']
  return '\n'.join([first, *more])


def are_possible() -> bool:
  """Returns whether matplotlib is installed."""
  return matplotlib is not None


def new(height: float, title: str = '') -> Figure:
  """Returns an empty figure of this height in inches, with a title if any."""
  figure = matplotlib.figure.Figure((WIDTH, height), layout='constrained')
  if title:
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH), fontsize=9)
  return figure


def panels(figure: Figure, count: int, most_a_line: int) -> list[Any]:
  """Returns the axes of that many panels, which share their scales."""
  num_columns = min(count, most_a_line)
  grid = figure.subplots(
    -(-count // num_columns),
    num_columns,
    sharex=True,
    sharey=True,
    squeeze=False,
  )
  for axes in grid.flat[count:]:
    axes.set_axis_off()
  return list(grid.flat[:count])


def ink() -> Any:
  """Returns the colour of lines and text; in a page, the page's own."""
  return matplotlib.rcParams['text.color']


def paper() -> Any:
  """Returns the colour of the background."""
  return matplotlib.rcParams['figure.facecolor']


def halo() -> list[Any]:
  """Returns the effects that show a thin line over dark bars as well."""
  around = matplotlib.patheffects.withStroke(linewidth=2.4, foreground=paper())
  return [around]


def style(axes: Any) -> None:
  """Leaves out the frame on two sides, as all figures do."""
  axes.spines[['top', 'right']].set_visible(False)


def count_by_thousands(axis: Any) -> None:
  """Labels an axis with 20k instead of 20000."""
  axis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=''))


def count_by_ones(axis: Any) -> None:
  """Labels an axis with whole numbers only."""
  axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def written(*names: str) -> str:
  """Returns the names of written files, without figures if there are none."""
  there = [x for x in names if are_possible() or not x.endswith('.png')]
  return ' and '.join(filter(None, (', '.join(there[:-1]), there[-1])))


def write_png(path: pathlib.PurePath, draw: Callable[[], Figure]) -> None:
  """Writes the figure; without matplotlib, prints that it is left out."""
  if not are_possible():
    print(f'{path.name} is left out: {MISSING}')
    return
  image = io.BytesIO()
  with matplotlib.rc_context(_PLAIN):
    draw().savefig(image, format='png', dpi=150)
  files.write(path, image.getvalue())


def to_svg(draw: Callable[[], Figure], name: str) -> str:
  """Returns the figure as an SVG element of a page, in the page's own colours.

  `draw` uses `ink` and `paper` for black and white, and `name` is unique among
  the figures of the page.
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
  # Otherwise the file would say when it was made, and by what.
  nothing = dict.fromkeys(('Creator', 'Date', 'Format', 'Type'))
  with matplotlib.rc_context(settings):
    draw().savefig(image, format='svg', metadata=nothing)
  svg = image.getvalue()
  svg = svg[svg.index('<svg') :].rstrip()
  svg = svg.replace(_INK, 'currentColor').replace(_PAPER, 'var(--paper)')
  # Too dark for a dark page, which has another one.
  svg = svg.replace(PLUM.lower(), 'var(--plum)')
  # Ids are global in a page, and every figure has a figure_1.
  of_figure = lambda tag: re.sub(
    r'( id="|url\(#|href="#)', rf'\g<1>{name}-', tag[0]
  )
  return re.sub('<[^<>]*>', of_figure, svg)
