"""Drafting methods: frozen dataclasses with init, extend, propose, update."""

from specsample.drafters.adaptive import Adaptive
from specsample.drafters.chain import Chain
from specsample.drafters.dflash import DFlash
from specsample.drafters.draft_model import DraftModel
from specsample.drafters.dspark import DSpark
from specsample.drafters.dynamic_tree import DynamicTree
from specsample.drafters.eagle import Eagle
from specsample.drafters.eagle import Eagle3
from specsample.drafters.either import Either
from specsample.drafters.given import Given
from specsample.drafters.hydra import Hydra
from specsample.drafters.medusa import Medusa
from specsample.drafters.mtp import MTP
from specsample.drafters.ngram import Ngram
from specsample.drafters.ngram import NgramTree
from specsample.drafters.none import NoDraft
from specsample.drafters.recording import Recording
from specsample.drafters.skip import Skip
from specsample.drafters.suffix import Suffix
from specsample.drafters.tli import TLI
from specsample.drafters.tree import Tree

__all__ = [
  'MTP',
  'TLI',
  'Adaptive',
  'Chain',
  'DFlash',
  'DSpark',
  'DraftModel',
  'DynamicTree',
  'Eagle',
  'Eagle3',
  'Either',
  'Given',
  'Hydra',
  'Medusa',
  'Ngram',
  'NgramTree',
  'NoDraft',
  'Recording',
  'Skip',
  'Suffix',
  'Tree',
]
