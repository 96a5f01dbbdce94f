"""Text as tokens, and tokens as text."""

from specsample.text.tokenizer import continuation
from specsample.text.tokenizer import pieces
from specsample.text.tokenizer import TextStream
from specsample.text.tokenizer import Tokenizer

__all__ = [
  'TextStream',
  'Tokenizer',
  'continuation',
  'pieces',
]
