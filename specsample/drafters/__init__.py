"""Drafting methods: frozen dataclasses that `Drafter` describes."""

from specsample.drafters.adaptive import Adaptive
from specsample.drafters.assistant import Assistant
from specsample.drafters.chain import Chain
from specsample.drafters.dflash import DFlash
from specsample.drafters.dflash2 import DFlash2
from specsample.drafters.draft_model import DraftModel
from specsample.drafters.dspark import DSpark
from specsample.drafters.dynamic_tree import DynamicTree
from specsample.drafters.eagle import Eagle
from specsample.drafters.eagle import Eagle3
from specsample.drafters.either import Either
from specsample.drafters.given import Given
from specsample.drafters.hydra import Hydra
from specsample.drafters.lattice import LatticeTree
from specsample.drafters.medusa import Medusa
from specsample.drafters.mtp import MTP
from specsample.drafters.ngram import Ngram
from specsample.drafters.ngram import NgramTree
from specsample.drafters.none import NoDraft
from specsample.drafters.p_eagle import PEagle
from specsample.drafters.pard import PARD
from specsample.drafters.recording import Recording
from specsample.drafters.skip import Skip
from specsample.drafters.suffix import Suffix
from specsample.drafters.tli import TLI
from specsample.drafters.tree import Tree

__all__ = [
  'MTP',
  'PARD',
  'TLI',
  'Adaptive',
  'Assistant',
  'Chain',
  'DFlash',
  'DFlash2',
  'DSpark',
  'DraftModel',
  'DynamicTree',
  'Eagle',
  'Eagle3',
  'Either',
  'Given',
  'Hydra',
  'LatticeTree',
  'Medusa',
  'Ngram',
  'NgramTree',
  'NoDraft',
  'PEagle',
  'Recording',
  'Skip',
  'Suffix',
  'Tree',
]
