"""Evidence that decoding is exact, and that a mistake would be noticed."""


def __getattr__(name):
  # Configurations refer to `certificate.Plan`. It is imported lazily, because
  # users of this folder's other modules do not need it.
  if name == 'Plan':
    from experiments.certificate import certificate  # noqa: PLC0415

    return certificate.Plan
  raise AttributeError(name)
