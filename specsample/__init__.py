"""Exact speculative sampling in JAX."""

from specsample import chips
from specsample import cost
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import slem
from specsample import stats
from specsample import store
from specsample import verify
from specsample import work
from specsample.choosing import auto
from specsample.choosing import Choice
from specsample.continuous import generate_all
from specsample.decode import advance
from specsample.decode import finish
from specsample.decode import generate
from specsample.decode import prefill
from specsample.drafter_files import load_drafter
from specsample.drafter_files import LoadedDrafter
from specsample.drafter_files import save_drafter
from specsample.history import History
from specsample.loading import load
from specsample.loading import Loaded
from specsample.pairing import match_vocabulary
from specsample.request import pad_prompts
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.store_files import load_store
from specsample.store_files import save_store
from specsample.turns import extend
from specsample.types import Origin, Output, StopReason
from specsample.vocab_map import map_vocabulary
from specsample.vocab_map import VocabMap

__all__ = [
  'Choice',
  'History',
  'Loaded',
  'LoadedDrafter',
  'Origin',
  'Output',
  'Sampling',
  'Stop',
  'StopReason',
  'VocabMap',
  'advance',
  'auto',
  'chips',
  'cost',
  'drafters',
  'extend',
  'finish',
  'generate',
  'generate_all',
  'load',
  'load_drafter',
  'load_store',
  'map_vocabulary',
  'match_vocabulary',
  'pad_prompts',
  'policies',
  'prefill',
  'save_drafter',
  'save_store',
  'sharding',
  'slem',
  'stats',
  'store',
  'verify',
  'work',
]
