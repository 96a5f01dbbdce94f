"""Exact speculative sampling in JAX."""

from specsample import cost
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import stats
from specsample import verify
from specsample.answer import Answer
from specsample.answer import generate_text
from specsample.choosing.choice import auto
from specsample.choosing.choice import Choice
from specsample.constraint import Constraint
from specsample.cost import chips
from specsample.cost import work
from specsample.drafter import Drafter
from specsample.loading.drafter import load_drafter
from specsample.loading.drafter import LoadedDrafter
from specsample.loading.drafter import save_drafter
from specsample.loading.export import export_drafter
from specsample.loading.load import load
from specsample.loading.load import Loaded
from specsample.loading.padding import match_vocabulary
from specsample.loading.store_files import load_store
from specsample.loading.store_files import save_store
from specsample.loop.continuous import generate_all
from specsample.loop.decode import advance
from specsample.loop.decode import finish
from specsample.loop.decode import generate
from specsample.loop.decode import prefill
from specsample.loop.decoder import Decoder
from specsample.loop.request import pad_prompts
from specsample.loop.turns import extend
from specsample.memory import store
from specsample.memory.history import History
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.training.rollout import rollout
from specsample.training.rollout import Rollouts
from specsample.types import Origin, Output, StopReason
from specsample.vocabularies import slem
from specsample.vocabularies.stop_texts import StopTexts
from specsample.vocabularies.vocab_map import map_vocabulary
from specsample.vocabularies.vocab_map import VocabMap

__all__ = [
  'Answer',
  'Choice',
  'Constraint',
  'Decoder',
  'Drafter',
  'History',
  'Loaded',
  'LoadedDrafter',
  'Origin',
  'Output',
  'Rollouts',
  'Sampling',
  'Stop',
  'StopReason',
  'StopTexts',
  'VocabMap',
  'advance',
  'auto',
  'chips',
  'cost',
  'drafters',
  'export_drafter',
  'extend',
  'finish',
  'generate',
  'generate_all',
  'generate_text',
  'load',
  'load_drafter',
  'load_store',
  'map_vocabulary',
  'match_vocabulary',
  'pad_prompts',
  'policies',
  'prefill',
  'rollout',
  'save_drafter',
  'save_store',
  'sharding',
  'slem',
  'stats',
  'store',
  'verify',
  'work',
]
