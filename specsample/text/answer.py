"""The message that an answer is: its thoughts apart from what it says."""

import re

# The marks around thoughts: those of Qwen and DeepSeek, whose chat template may
# already write the first one, and those of Gemma 4.
_MARKS = (('<think>', '</think>'), ('<|channel>thought', '<channel|>'))
# gpt-oss writes a message for each channel; one with a recipient calls a tool.
_CHANNEL = re.compile(
  r'<\|channel\|>(analysis|commentary|final)(?: *<\|constrain\|>\w+)?'
  r'<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)',
  re.DOTALL,
)


def split_thoughts(text: str) -> tuple[str, str]:
  """Returns an answer's thoughts and what it says, each '' if there is none.

  Args:
    text: the answer, with its control tokens spelled out. If it was cut short
      among its thoughts, it says nothing.
  """
  if '<|channel|>' in text:
    messages = _CHANNEL.findall(text)
    thoughts = [text for channel, text in messages if channel == 'analysis']
    said = [text for channel, text in messages if channel != 'analysis']
    return '\n'.join(thoughts), '\n'.join(said)
  for begin, end in _MARKS:
    before, found, after = text.partition(end)
    if found or text.lstrip().startswith(begin):
      return before.replace(begin, '', 1).strip(), after
  return '', text
