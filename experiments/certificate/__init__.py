"""That decoding is exact, and that the check would notice if not."""


def __getattr__(name):
  # Configurations name it; others of this folder do without the rest.
  if name == 'Plan':
    from experiments.certificate import certificate  # noqa: PLC0415

    return certificate.Plan
  raise AttributeError(name)
