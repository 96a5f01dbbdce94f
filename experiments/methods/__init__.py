"""Methods of decoding, as configurations assemble them."""

from experiments.methods.method import all_params
from experiments.methods.method import auto
from experiments.methods.method import BASELINE
from experiments.methods.method import best_tree
from experiments.methods.method import candidates
from experiments.methods.method import check_length
from experiments.methods.method import drafting
from experiments.methods.method import dynamic_tree
from experiments.methods.method import file_name
from experiments.methods.method import has_log_probs
from experiments.methods.method import judged
from experiments.methods.method import lattice_tree
from experiments.methods.method import Method
from experiments.methods.method import model
from experiments.methods.method import params
from experiments.methods.method import remake
from experiments.methods.method import tli
from experiments.methods.method import trained
from experiments.methods.method import tree

__all__ = [
  'BASELINE',
  'Method',
  'all_params',
  'auto',
  'best_tree',
  'candidates',
  'check_length',
  'drafting',
  'dynamic_tree',
  'file_name',
  'has_log_probs',
  'judged',
  'lattice_tree',
  'model',
  'params',
  'remake',
  'tli',
  'trained',
  'tree',
]
