"""Checks of the configured rules for dividing arrays over mesh axes."""

import re

from specsample import sharding


def check(name: str, rules: sharding.Rules) -> None:
  """Refuses rules over axes that no array or no mesh has.

  Args:
    name: the name of the setting, for messages.
    rules: the value of the setting.

  Raises:
    ValueError: if the rules are not valid; it names the rule.
  """
  wanted = (
    "give pairs such as ('batch', ('data',)), with mesh axes 'data', 'model', "
    "'sequence' and 'model_0', 'model_1', ..."
  )
  if not isinstance(rules, tuple):
    raise ValueError(f'{name} is {rules!r}, which is not a tuple: {wanted}')
  known = [axis for axis, _ in sharding.DEFAULT_RULES]
  for rule in rules:
    is_rule = (
      isinstance(rule, tuple)
      and len(rule) == 2
      and isinstance(rule[0], str)
      and isinstance(rule[1], tuple)
      and all(
        re.fullmatch(r'data|sequence|model(_\d+)?', str(axis))
        for axis in rule[1]
      )
    )
    if is_rule and rule[0] not in known:
      raise ValueError(
        f'{name} has {rule[0]!r}, but no array has an axis of that name: '
        f'give rules for {", ".join(known)}'
      )
    if not is_rule:
      raise ValueError(f'{name} holds {rule!r}: {wanted}')
