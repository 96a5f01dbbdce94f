"""Conversion of text to tokens and back."""

from specsample.text.chat import split_thoughts
from specsample.text.tokenizer import continuation
from specsample.text.tokenizer import pieces
from specsample.text.tokenizer import TextStream
from specsample.text.tokenizer import Tokenizer

__all__ = [
  'TextStream',
  'Tokenizer',
  'continuation',
  'pieces',
  'split_thoughts',
]
