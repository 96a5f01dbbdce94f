"""Verification rules: callables with a `.law`, one paper per file."""

from specsample.verify.block import block
from specsample.verify.candidates import Candidates
from specsample.verify.certified import Certified
from specsample.verify.certified import certified
from specsample.verify.chain import chain
from specsample.verify.coupled import coupled
from specsample.verify.greedy_draft import greedy_draft
from specsample.verify.k_seq import k_seq
from specsample.verify.lenient import Lenient
from specsample.verify.multi_path_block import multi_path_block
from specsample.verify.synthetic import Synthetic
from specsample.verify.traversal import traversal
from specsample.verify.tree import tree
from specsample.verify.typical import Typical

__all__ = [
  'Candidates',
  'Certified',
  'Lenient',
  'Synthetic',
  'Typical',
  'block',
  'certified',
  'chain',
  'coupled',
  'greedy_draft',
  'k_seq',
  'multi_path_block',
  'traversal',
  'tree',
]
