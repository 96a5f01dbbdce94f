"""The evaluation of methods over prompts, which gives a table."""


def __getattr__(name):
  # Configurations use this name; other modules of the folder load without it.
  if name == 'Evaluation':
    from experiments.evaluation import evaluation  # noqa: PLC0415

    return evaluation.Evaluation
  raise AttributeError(name)
