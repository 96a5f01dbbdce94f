"""A generation as running text, each token marked by its origin.

The colours are those of Figure 1 of Leviathan et al., 2211.17192.
"""

import rich.cells
import rich.console
import rich.text

from experiments.decoding import generation
import specsample
from specsample import text as text_lib

_STYLES = {
  specsample.Origin.ACCEPTED: 'green',
  specsample.Origin.CORRECTION: 'bold red',
  specsample.Origin.BONUS: 'bold blue',
  specsample.Origin.PLAIN: '',
}
_NAMES = {
  specsample.Origin.ACCEPTED: 'accepted draft',
  specsample.Origin.CORRECTION: 'correction',
  specsample.Origin.BONUS: 'bonus',
  specsample.Origin.PLAIN: 'plain (the round drafted nothing)',
}


class ColourView:
  """A view of running text, coloured by the origin of each token.

  Without colours, accepted draft tokens appear in brackets. On a terminal,
  lines are broken between words.
  """

  def __init__(
    self, tokenizer: text_lib.Tokenizer, console: rich.console.Console
  ):
    """Starts a view on `console`; `tokenizer` turns the tokens into text."""
    self._stream = text_lib.TextStream(tokenizer)
    self._has_colours = has_colours(console)
    self._writer = _Writer(console)

  def show(self, shown: generation.Chunk) -> None:
    """See `display.View`."""
    is_open = False
    for token, origin in zip(shown.tokens, shown.origins, strict=True):
      text = self._stream.push([token])
      style = _STYLES[origin]
      if not self._has_colours:
        style = ''
        is_accepted = origin == specsample.Origin.ACCEPTED
        if text and is_accepted != is_open:
          text = ('[' if is_accepted else ']') + text
          is_open = is_accepted
      self._writer.write(text, style)
    if is_open:
      self._writer.write(']', '')
    self._writer.flush()

  def close(self) -> None:
    """See `display.View`."""
    self._writer.write(self._stream.finish() + '\n', '')
    self._writer.flush()


def print_legend(console: rich.console.Console) -> None:
  """Prints what the colours or the brackets mean."""
  if has_colours(console):
    parts = [rich.text.Text(_NAMES[o], _STYLES[o]) for o in _STYLES]
    legend = rich.text.Text(', ').join(parts)
  else:
    accepted, *others, plain = _NAMES.values()
    legend = rich.text.Text(
      f'[{accepted}], unmarked: {", ".join(others)} or {plain}'
    )
  console.print(legend, soft_wrap=not console.is_terminal)


def has_colours(console: rich.console.Console) -> bool:
  """Returns whether the console shows colours."""
  return console.color_system is not None and not console.no_color


class _Writer:
  """A writer of styled text that breaks a terminal's lines between words.

  On a terminal, it holds text back until the word is complete.
  """

  def __init__(self, console: rich.console.Console):
    self._console = console
    self._width = console.width if console.is_terminal else None
    self._column = 0
    self._line = _Pieces()  # complete words only
    self._word = _Pieces()

  def write(self, text: str, style: str) -> None:
    for character in text:
      if not character.isspace():
        self._word.append(character, style)
        continue
      self._end_word()
      self._column = 0 if character == '\n' else self._column + 1
      self._line.append(character, style)

  def flush(self) -> None:
    if self._width is None:
      self._end_word()
    if self._line.pieces:
      line = rich.text.Text.assemble(*self._line.pieces)
      self._console.print(line, end='', soft_wrap=True)
      self._line = _Pieces()

  def _end_word(self):
    size = sum(rich.cells.cell_len(text) for text, _ in self._word.pieces)
    if self._width is not None and self._column + size > self._width:
      if self._column:
        self._line.append('\n', '')
      self._column = 0
    self._column += size
    for piece in self._word.pieces:
      self._line.append(*piece)
    self._word = _Pieces()


class _Pieces:
  """Pieces of text with their styles; neighbours differ in style."""

  def __init__(self):
    self.pieces: list[tuple[str, str]] = []

  def append(self, text: str, style: str) -> None:
    if self.pieces and self.pieces[-1][1] == style:
      text = self.pieces.pop()[0] + text
    self.pieces.append((text, style))
