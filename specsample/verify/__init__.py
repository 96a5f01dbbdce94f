"""Verification rules: callables with a `.law`, one paper a file."""

from specsample.verify.block import block
from specsample.verify.chain import chain
from specsample.verify.coupled import coupled
from specsample.verify.synthetic import Synthetic

__all__ = ['Synthetic', 'block', 'chain', 'coupled']
