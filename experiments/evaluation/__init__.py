"""Methods x prompts -> a table."""


def __getattr__(name):
  # Configurations name it; others of this folder do without the rest.
  if name == 'Evaluation':
    from experiments.evaluation import evaluation  # noqa: PLC0415

    return evaluation.Evaluation
  raise AttributeError(name)
