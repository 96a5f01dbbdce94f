"""How a drafter is trained."""


def __getattr__(name):
  # Configurations name it; others of this folder do without the rest.
  if name == 'Training':
    from experiments.training import training  # noqa: PLC0415

    return training.Training
  raise AttributeError(name)
