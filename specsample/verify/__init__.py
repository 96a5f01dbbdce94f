"""Verification rules: callables with a `.law`, one paper a file."""

from specsample.verify.block import block
from specsample.verify.chain import chain
from specsample.verify.coupled import coupled

__all__ = ['block', 'chain', 'coupled']
