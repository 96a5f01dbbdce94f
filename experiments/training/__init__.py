"""The training of a drafter."""


def __getattr__(name):
  # Gin configurations import `Training` from here. It is loaded lazily, because
  # other users of this package do without the rest.
  if name == 'Training':
    from experiments.training import training  # noqa: PLC0415

    return training.Training
  raise AttributeError(name)
