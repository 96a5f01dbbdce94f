"""The evaluation of methods over prompts, which gives a table."""

# Configurations use this name.
from experiments.evaluation.evaluation import Evaluation as Evaluation
